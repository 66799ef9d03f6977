"""Output file of generated records, which can be continued after an interruption."""

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger


def check_apart(path: Path, data: Sequence[str]) -> None:
    """Raise an error if an output file would be read as data, now or when it is continued."""
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


_logger = get_logger(__name__)

_FINISHED = "finished"  # hash of the inputs of the complete file, and its size in bytes
RAISED_FROM = "raised_from"  # the limit with which the earlier records were written


class OutputFile:
    """A JSONL file of generated records, each with its number (key `record`).

    Next to this file, another file whose name ends in `.settings` contains the settings with which
    the records were generated, so that a later run with the same settings can continue the file.
    While records are written again with a larger limit, the earlier records are in a file whose
    name ends in `.earlier`. A hidden file whose name ends in `.lock` stays after the first run.

    Attributes:
        last_record: number of the last record in the file, from 1; 0 if the file has no records.
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
    def claim(self, fingerprint: Mapping[str, Any], limit: str | None = None) -> Iterator[None]:
        """Lock the file, check its settings, and find its last complete record.

        Args:
            fingerprint: JSON values of everything that determines the records, by name.
            limit: name of the setting that may be larger than before. If it is, the file starts
                again, and `earlier` has its previous records. None if no setting may differ.
        """
        # The file of the lock stays: after its removal, two processes could lock two files.
        try:
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0):
                self._check_or_store(fingerprint, limit)
                self._find_end()
                yield
        except Timeout as error:
            raise ConfigError(
                f"another process is writing to {self.path}",
                expected="a file that no other process uses",
                got="a locked file",
                remedy="wait for the other process, or choose another file",
            ) from error

    @contextmanager
    def kept_when_interrupted(self) -> Iterator[None]:
        """After Ctrl-C, log how many records the file has and how to continue it."""
        try:
            yield
        except KeyboardInterrupt:
            _logger.info(
                "%s records are in %s; the same command continues with the next",
                f"{self.num_records:,}",
                self.path,
            )
            raise

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records in the file, in order."""
        if self.path.exists():
            with self.path.open("rb") as file:
                yield from map(json.loads, file)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records and flush them to the disk."""
        # Values such as dates, which other formats have but JSON has not, become strings.
        lines = [json.dumps(record, default=str) + "\n" for record in records]
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

    def mark_finished(self, inputs: str) -> None:
        """Store that the file is complete, and the hash of its inputs."""
        known = json.loads(self._settings.read_bytes())
        self._store({**known, _FINISHED: [inputs, self.path.stat().st_size]})

    def is_finished_from(self, inputs: str) -> bool:
        """Return whether the file is complete and has the same inputs; if so, count its records."""
        if not (self.path.exists() and self._settings.exists()):
            return False
        known = json.loads(self._settings.read_bytes())
        if known.get(_FINISHED) != [inputs, self.path.stat().st_size]:
            return False
        self.num_records = sum(1 for _ in self.records())
        return True

    @property
    def earlier_limit(self) -> int | None:
        """The smaller limit of the earlier records; None if there are no earlier records."""
        known = json.loads(self._settings.read_bytes()) if self._settings.exists() else {}
        return known.get(RAISED_FROM)

    def earlier(self) -> Generator[dict[str, Any], None, None]:
        """Yield the records that were written with a smaller limit, in order."""
        if self.earlier_limit is not None:
            with self._earlier.open("rb") as file:
                yield from map(json.loads, file)

    def forget_earlier(self) -> None:
        """Delete the records that were written with a smaller limit."""
        if self.earlier_limit is not None:
            known = json.loads(self._settings.read_bytes())
            self._store({name: value for name, value in known.items() if name != RAISED_FROM})
            self._earlier.unlink(missing_ok=True)

    @property
    def _settings(self) -> Path:
        return self.path.with_name(f"{self.path.name}.settings")

    @property
    def _earlier(self) -> Path:
        return self.path.with_name(f"{self.path.name}.earlier")

    def _store(self, settings: Mapping[str, Any]) -> None:
        with self._writing():
            write_atomically(self._settings, json.dumps(settings, indent=1))

    def _check_or_store(self, fingerprint: Mapping[str, Any], limit: str | None) -> None:
        settings = self._settings
        is_begun = self.path.exists() and self.path.stat().st_size > 0
        if not is_begun and self.earlier_limit is None:
            self._store(fingerprint)
            return
        if not settings.exists():
            raise ConfigError(
                f"{self.path} was not written by this command",
                expected=f"{settings.name} in the same folder",
                got="no such file",
                remedy="choose another file",
            )
        known = json.loads(settings.read_bytes())
        has_new = is_begun and self._earlier.exists()  # records with the raised limit
        if self.earlier_limit is None:
            self._earlier.unlink(missing_ok=True)  # `forget_earlier` may have been interrupted
        if self.earlier_limit is None and _is_raised(limit, known, fingerprint):
            assert limit is not None
            self._store({**fingerprint, RAISED_FROM: known[limit]})
        elif not has_new and self._is_raised_otherwise(limit, known, fingerprint):
            assert limit is not None
            self._raise_again(fingerprint, limit)
        else:
            self._check(known, fingerprint)
        if self.earlier_limit is not None and not self._earlier.exists():
            self.path.replace(self._earlier)

    def _is_raised_otherwise(
        self, limit: str | None, known: Mapping[str, Any], fingerprint: Mapping[str, Any]
    ) -> bool:
        """Return whether only the limit differs, and the earlier records allow it as well."""
        earlier = self.earlier_limit
        if earlier is None or limit is None or _differing(known, fingerprint) != [limit]:
            return False
        return bool(fingerprint[limit] >= earlier)

    def _raise_again(self, fingerprint: Mapping[str, Any], limit: str) -> None:
        """Begin with another limit; no record was written with the last one."""
        earlier = self.earlier_limit
        if fingerprint[limit] == earlier:
            if self._earlier.exists():
                self._earlier.replace(self.path)
            self._store(fingerprint)
            return
        self._store({**fingerprint, RAISED_FROM: earlier})

    def _check(self, known: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
        settings = self._settings
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
        self.last_record = int(json.loads(last)["record"]) if last else 0


def _is_raised(limit: str | None, known: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Return whether the settings differ only in a larger limit."""
    return (
        limit is not None
        and _differing(known, fingerprint) == [limit]
        and limit in known
        and fingerprint[limit] > known[limit]
    )


def _differing(known: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[str]:
    return [name for name, value in fingerprint.items() if known.get(name) != value]
