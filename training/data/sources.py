"""Where training data comes from: files, folders, and data sets of the hub, read row by row."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jakiro.errors import DataError
from jakiro.utils.logs import get_logger

_SHOWN = 5  # skipped rows that are named; the others are only counted

_logger = get_logger(__name__)


class RowError(DataError):
    """One row cannot be used; the others may be fine."""


@dataclass
class Intake:
    """Counts rows while they are read.

    Attributes:
        is_skipping: leave unusable rows out; by default the first one is raised.
        rows: read so far, unusable ones included.
        skipped: unusable ones.
    """

    is_skipping: bool = False
    rows: int = 0
    skipped: int = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Pass over what is done with an unusable row, if that is wanted.

        Raises:
            RowError: the row is unusable, and rows are not to be skipped.
        """
        try:
            yield
        except RowError as error:
            if not self.is_skipping:
                raise
            self.skipped += 1
            if self.skipped <= _SHOWN:
                _logger.warning(f"skipped: {error}")


class Record(NamedTuple):
    """One row of data, and where it stands, such as `chats.jsonl:12`.

    Attributes:
        fields: of the row.
        place: for messages.
        number: of its line (JSONL) or of the row (others) in its source, counted from 1.
        source: which of several sources, counted from 0.
    """

    fields: dict[str, Any]
    place: str
    number: int = 0
    source: int = 0


@dataclass(frozen=True)
class FileSource:
    """A JSONL file, a JSON file with one list, or a Parquet file."""

    path: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)

    def fingerprint(self) -> str:
        """Return a hash of the file's bytes."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def records(self, intake: Intake | None = None) -> Iterator[Record]:
        """Yield the file's rows with their line (JSONL) or number (others), counted from 1.

        Args:
            intake: counts the rows, and may pass over malformed ones.

        Raises:
            DataError: the file or a row is malformed; the message names its place.
        """
        intake = intake or Intake()
        for number, row in _READERS[self.path.suffix](self.path):
            intake.rows += 1
            record = None
            with intake.guard():
                record = _as_record(row, f"{self.name}:{number}", number)
            if record is not None:
                yield record


@dataclass(frozen=True)
class HubSource:
    """A split of a data set that the `datasets` library finds by name."""

    name: str
    split: str

    def fingerprint(self) -> str:
        """Return the library's own hash of the data set."""
        return str(self._load()._fingerprint)

    def records(self, intake: Intake | None = None) -> Iterator[Record]:
        """Yield the data set's rows with their number, counted from 1.

        Args:
            intake: counts the rows.

        Raises:
            DataError: the data set cannot be loaded.
        """
        intake = intake or Intake()
        for number, fields in enumerate(self._load(), start=1):
            intake.rows += 1
            yield Record(fields, f"{self.name}:{number}", number)

    def _load(self) -> Any:
        from datasets import load_dataset  # takes seconds to import; files do not need it

        try:
            return load_dataset(self.name, split=self.split)
        except (OSError, RuntimeError, ValueError) as error:  # offline, unknown, no such split
            raise DataError(
                f"cannot load the data set {self.name!r}",
                expected=f"a file, a folder, or a data set of the hub with a split {self.split!r}",
                got=str(error).splitlines()[0],
                remedy="check data.paths",
            ) from error


Source = FileSource | HubSource


def read_all(sources: Sequence[Source], intake: Intake) -> Iterator[Record]:
    """Yield the rows of all sources, each with the number of its source; see their `records`."""
    for number, source in enumerate(sources):
        for record in source.records(intake):
            yield record._replace(source=number)


def is_data(path: Path) -> bool:
    """Return whether a file's name says that it holds rows of data."""
    return path.suffix in _READERS


def find_sources(paths: Sequence[str]) -> tuple[Source, ...]:
    """Return what the paths name; a folder stands for all data files below it, in order.

    Raises:
        DataError: a file is missing or of an unknown kind, or a folder holds no data.
    """
    return tuple(source for path in paths for source in _sources_at(path))


def is_local(name: str) -> bool:
    """Return whether a name is that of a file or folder; if not, the hub may know it."""
    path = Path(name).expanduser()
    is_written_as_one = path.is_absolute() or name.startswith((".", "~"))
    return path.exists() or is_written_as_one or path.suffix in _READERS


def _sources_at(name: str) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _sources_in(path)
    if path.is_file():
        return [_file_source(path)]
    if is_local(name):
        raise DataError(
            f"there is no file or folder {name}",
            expected="training data",
            got="nothing",
            remedy="check data.paths",
        )
    hub_name, _, split = name.partition(":")
    return [HubSource(hub_name, split or "train")]


def _sources_in(folder: Path) -> list[Source]:
    files = sorted(path for path in folder.rglob("*") if is_data(path) and path.is_file())
    if not files:
        raise DataError(
            f"the folder {folder} holds no training data",
            expected=f"files that end in {', '.join(_READERS)}",
            got="none",
        )
    return [FileSource(path) for path in files]


def _file_source(path: Path) -> FileSource:
    if path.suffix not in _READERS:
        raise DataError(
            f"cannot tell what kind of file {path} is",
            expected=f"a name that ends in {', '.join(_READERS)}",
            got=path.suffix or "no ending",
        )
    return FileSource(path)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line  # parsed where a malformed one may be passed over


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON", expected="valid JSON", got=error) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path} holds no rows",
            expected="a list of objects",
            got=type(rows).__name__,
            remedy="end the file's name in .jsonl if it has one object per line",
        )
    yield from enumerate(rows, start=1)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        batches = ParquetFile(path).iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}", expected="a Parquet file", got=error) from error


def _as_record(row: Any, place: str, number: int) -> Record:
    fields = _parse(row, place) if isinstance(row, bytes) else row
    if not isinstance(fields, dict):
        raise RowError(f"{place} is no row", expected="an object", got=type(fields).__name__)
    return Record(fields, place, number)


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or brackets without end
        raise RowError(f"{place} is not JSON", expected="valid JSON", got=error) from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
