"""Output file of generated records, which can be continued after an interruption."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically


def check_apart(path: Path, data: Sequence[str]) -> None:
    """Raise an error if an output file would be read as data, now or when it is continued.

    Args:
        path: path of the output file, which need not exist.
        data: files, folders and datasets, as for `find_sources`.

    Raises:
        ConfigError: the file is part of the data, or will be as soon as it exists.
    """
    real = path.resolve()
    for name in data:
        read = Path(name).expanduser()
        if read.exists() and (read.resolve() == real or read.resolve() in real.parents):
            raise ConfigError(
                f"{path} would be part of the data that it is made from",
                expected=f"a file outside of {name}" if read.is_dir() else "a different file",
                got=f"--data {name}",
                remedy="choose another path for --out",
            )


class OutputFile:
    """A JSONL file of generated records, in ascending order of their numbers (key `row`).

    Next to this file, another file whose name ends in `.settings` contains the settings with which
    the records were generated, so that a later run with the same settings can continue the file.

    Args:
        path: path of the file, which need not exist.

    Attributes:
        num_records: number of records in the file.
        last_record: number of the last record in the file, from 1; 0 if the file has no records.

    Raises:
        ConfigError: the name does not end in .jsonl, or the folder cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != ".jsonl":
            raise ConfigError(
                f"cannot write records to {path}",
                expected="a name that ends in .jsonl",
                got=path.name,
            )
        ensure_writable_folder(path.absolute().parent)
        self.path = path
        self.num_records = 0
        self.last_record = 0

    @contextmanager
    def claim(self, fingerprint: Mapping[str, Any]) -> Iterator[None]:
        """Lock the file, check its settings, and find its last complete record.

        Args:
            fingerprint: JSON values of everything that determines the records, by name.

        Raises:
            ConfigError: another process writes to the file, or the file was made with settings
                other than `fingerprint`.
        """
        try:
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0):
                self._check_or_store(fingerprint)
                self._find_end()
                yield
        except Timeout as error:
            raise ConfigError(
                f"another process is writing to {self.path}",
                expected="a file that no other process uses",
                got="a locked file",
                remedy="wait for the other process, or choose another file",
            ) from error

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records in the file, in order."""
        if self.path.exists():
            with self.path.open("rb") as file:
                yield from map(json.loads, file)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records and flush them to the disk.

        Raises:
            ConfigError: the records cannot be written; earlier records are kept.
        """
        lines = [json.dumps(record) + "\n" for record in records]
        with self._writing(), self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self.num_records += len(lines)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.path}",
                expected="enough free disk space",
                got=error.strerror or error,
                remedy="free disk space, and run the command again to continue the file",
            ) from error

    def _check_or_store(self, fingerprint: Mapping[str, Any]) -> None:
        settings = self.path.with_name(f"{self.path.name}.settings")
        is_begun = self.path.exists() and self.path.stat().st_size > 0
        if not is_begun:
            with self._writing():
                write_atomically(settings, json.dumps(fingerprint, indent=1))
            return
        if not settings.exists():
            raise ConfigError(
                f"{self.path} was not written by this command",
                expected=f"{settings.name} in the same folder",
                got="no such file",
                remedy="choose another file",
            )
        known = json.loads(settings.read_bytes())
        for name in fingerprint:
            if name not in known:
                raise ConfigError(
                    f"the settings of {self.path} are incomplete",
                    expected=f"{name} in {settings.name}",
                    got="no such key",
                    remedy="choose another file, and generate the records again",
                )
            if known[name] != fingerprint[name]:
                option = f"--dtype {known[name]}" if name == "target_dtype" else "the same settings"
                raise ConfigError(
                    f"{self.path} was made with other settings ({name} differs)",
                    expected=known[name],
                    got=fingerprint[name],
                    remedy=f"choose another file, or run again with {option}",
                )

    def _find_end(self) -> None:
        """Count the records, and cut off a line that an interruption left unfinished."""
        if not self.path.exists():
            return
        last, end, self.num_records = b"", 0, 0
        with self.path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                last, end, self.num_records = line, end + len(line), self.num_records + 1
            file.truncate(end)
        self.last_record = int(json.loads(last)["row"]) if last else 0
