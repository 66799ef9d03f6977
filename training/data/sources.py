"""Sources of training data: files, folders and Hugging Face datasets, read record by record."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jakiro.errors import DataError
from jakiro.utils.files import checksum
from jakiro.utils.logs import get_logger
from jakiro.utils.wording import summary_of

_logger = get_logger(__name__)

_SKIPPING = "to skip such records: --skip-bad-records, or data.skip_bad_records=true in settings"
_SHOWN = 5  # number of skipped records that are logged; any others are only counted


class RecordError(DataError):
    """A single record cannot be used; other records may be usable."""


@dataclass
class Intake:
    """Counter of the records that are read, which can also skip unusable records.

    Attributes:
        is_skipping: whether unusable records are skipped; if not, the first one raises an error.
            None if the user cannot choose to skip them.
        num_unlearned: number of turns from which nothing is learned, because they say so.
    """

    is_skipping: bool | None = None
    num_records: int = 0
    num_skipped: int = 0
    num_unlearned: int = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Count and suppress a `RecordError` raised in this context, if skipping is allowed."""
        try:
            yield
        except RecordError as error:
            if self.is_skipping is None:
                raise
            if not self.is_skipping:
                raise RecordError(f"{error}; {_SKIPPING}") from error
            self.num_skipped += 1
            if self.num_skipped <= _SHOWN:
                _logger.warning(f"skipped: {error}")


class Record(NamedTuple):
    """One record of the data, with its location, such as `chats.jsonl:12`.

    Attributes:
        number: line (JSONL) or index (other sources) of the record in its source, from 1; 0 if it
            is unknown.
    """

    fields: dict[str, Any]
    location: str
    number: int = 0
    source: int = 0


@dataclass(frozen=True)
class Source:
    """A JSONL, JSON or Parquet file, or a dataset that the `datasets` library finds by name."""

    name: str
    split: str | None = None

    def fingerprint(self) -> str:
        """Return a hash of the file's bytes, or the library's fingerprint of the dataset."""
        if self.split is None:
            return checksum(Path(self.name))
        return str(_load(self.name, self.split)._fingerprint)

    def num_records(self) -> int:
        return sum(1 for _ in self._values())

    def records(self, intake: Intake | None = None) -> Iterator[Record]:
        """Yield the records, each with its line (JSONL) or index (other sources), from 1."""
        intake = intake or Intake()
        for number, value in self._values():
            intake.num_records += 1
            with intake.guard():
                yield _record_of(value, f"{self.name}:{number}", number)

    def _values(self) -> Iterator[tuple[int, Any]]:
        if self.split is not None:
            values: Iterable[Any] = _load(self.name, self.split)
        else:
            path = Path(self.name)
            values = _READERS[path.suffix](path)
        for number, value in enumerate(values, start=1):
            if not (isinstance(value, bytes) and value.isspace()):  # an empty line
                yield number, value


def read_all(sources: Sequence[Source], intake: Intake) -> Iterator[Record]:
    for number, source in enumerate(sources):
        for record in source.records(intake):
            yield record._replace(source=number)
    if intake.num_records == 0:
        raise DataError(f"there are no records in {', '.join(source.name for source in sources)}")


def find_sources(paths: Sequence[str]) -> tuple[Source, ...]:
    """Return the sources at the given paths; a folder stands for its data files, sorted by path."""
    return tuple(source for path in paths for source in _sources_at(path))


def is_local(name: str) -> bool:
    """Return whether a name is the path of a file or folder, rather than the name of a dataset."""
    path = Path(name).expanduser()
    # Datasets without an owner have names without dots, unlike files such as chats.txt.
    is_file_name = "/" not in name and path.suffix[1:2].isalpha()
    is_below = "/" in name and Path(path.parts[0]).is_dir()
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or is_below
    return is_path or is_file_name or path.exists() or path.suffix in _READERS


def _sources_at(name: str) -> list[Source]:
    path, endings = Path(name).expanduser(), ", ".join(_READERS)
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix in _READERS and file.is_file()
        )
        if not files:
            raise DataError(
                f"the folder {path} contains no training data",
                expected=f"files that end in {endings}",
            )
        return [Source(str(file)) for file in files]
    if path.is_file():
        if path.suffix not in _READERS:
            raise DataError(
                f"{path} is of an unknown kind", expected=f"a name that ends in {endings}"
            )
        return [Source(str(path))]
    hub_name, _, split = name.partition(":")
    if is_local(hub_name):
        raise DataError(f"there is no file or folder {hub_name} of training data")
    return [Source(hub_name, split or "train")]


def _load(name: str, split: str) -> Any:
    from datasets import load_dataset  # slow to import, and not needed for files

    try:
        return load_dataset(name, split=split)
    except (OSError, RuntimeError, ValueError) as error:  # offline, or no such dataset or split
        raise DataError(
            f"cannot load the dataset {name!r} with a split {split!r}", got=summary_of(error)
        ) from error


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        yield from file  # parsed later, where a malformed line may be skipped


def _read_json(path: Path) -> Iterator[Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON", got=error) from error
    if not isinstance(values, list):
        raise DataError(
            f"{path} does not contain a list of records",
            remedy="rename the file to end in .jsonl if it has one object per line",
        )
    yield from values


def _read_parquet(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise DataError(f"cannot read the Parquet file {path}", got=error) from error


def _record_of(value: Any, location: str, number: int) -> Record:
    try:
        fields = json.loads(value) if isinstance(value, bytes) else value
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{location} is not JSON", got=error) from error
    if not isinstance(fields, dict):
        raise RecordError(f"{location} is not an object, but {type(fields).__name__}")
    return Record(fields, location, number)


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
