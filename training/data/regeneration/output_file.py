"""The file of new rows: one run's only, cut back to whole lines, continued where it ends."""

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
    """Refuse to write rows where they would be read as data, now or by the start that goes on.

    Args:
        path: of the file to be written; it need not exist.
        data: files, folders and names of data sets, as `find_sources` takes them.

    Raises:
        ConfigError: the file is part of the data, or would be.
    """
    real = path.resolve()
    for name in data:
        read = Path(name).expanduser()
        if read.exists() and (read.resolve() == real or read.resolve() in real.parents):
            raise ConfigError(
                f"{path} would be part of the data that it is made from",
                expected=f"a file outside of {name}" if read.is_dir() else "another file",
                got=f"--data {name}",
                remedy="choose another place for --out",
            )


class OutputFile:
    """A JSONL file of rows, each with its number in the data under `row`, ascending.

    Beside it lies a file that ends in `.settings`, by which a later start knows its own rows.

    Args:
        path: the file; it need not exist.

    Raises:
        ConfigError: its name does not end in .jsonl, or its folder cannot be written into.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != ".jsonl":
            raise ConfigError(
                f"cannot write rows to {path}", expected="a name that ends in .jsonl", got=path.name
            )
        ensure_writable_folder(path.absolute().parent)
        self.path = path
        self.num_rows = 0
        self.last_row = 0  # rows are counted from 1

    @contextmanager
    def claim(self, identity: Mapping[str, Any]) -> Iterator[None]:
        """Own the file, and find where it ends.

        Args:
            identity: what decides the rows, as data that JSON can hold.

        Raises:
            ConfigError: another process writes to it, or it was made otherwise.
        """
        try:
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0):
                self._check_or_found(identity)
                self._find_end()
                yield
        except Timeout as error:
            raise ConfigError(
                f"another process is writing to {self.path}",
                expected="a file of its own for each run",
                got="a lock",
                remedy="wait for it, or choose another file",
            ) from error

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows, which then are on the disk.

        Raises:
            ConfigError: they cannot be written; what was written before stays.
        """
        lines = [json.dumps(row) + "\n" for row in rows]
        with self._writing(), self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self.num_rows += len(lines)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.path}",
                expected="a disk with room",
                got=error.strerror or error,
                remedy="make room and start again: it goes on behind the last whole row",
            ) from error

    def _check_or_found(self, identity: Mapping[str, Any]) -> None:
        record = self.path.with_name(f"{self.path.name}.settings")
        is_begun = self.path.exists() and self.path.stat().st_size > 0
        if not is_begun:
            with self._writing():
                write_atomically(record, json.dumps(identity, indent=1))
            return
        if not record.exists():
            raise ConfigError(
                f"{self.path} holds rows of another origin",
                expected="a file that regeneration began",
                got=f"no {record.name} beside it",
                remedy="choose another file",
            )
        known = json.loads(record.read_bytes())
        for name in identity:
            if name not in known:
                raise ConfigError(
                    f"the settings of {self.path} are incomplete",
                    expected=f"{name} in {record.name}",
                    got="none",
                    remedy="choose another file, and make the rows again",
                )
            if known[name] != identity[name]:
                option = f" --dtype {known[name]}" if name == "target_dtype" else " the settings"
                raise ConfigError(
                    f"{self.path} was made with other settings ({name} differs)",
                    expected=known[name],
                    got=identity[name],
                    remedy=f"choose another file, or repeat{option}",
                )

    def _find_end(self) -> None:
        """Count the rows, and cut off a line that an interruption left unfinished."""
        if not self.path.exists():
            return
        last, end = b"", 0
        with self.path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                last, end, self.num_rows = line, end + len(line), self.num_rows + 1
            file.truncate(end)
        self.last_row = int(json.loads(last)["row"]) if last else 0
