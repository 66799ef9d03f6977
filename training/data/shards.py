"""Compression of training data into small Parquet files, optionally without names of persons."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jakiro.errors import ConfigError, DataError
from jakiro.utils.files import ensure_writable_folder
from training.data.persons import common_words, names_person
from training.data.sources import FileSource, find_sources

RECORDS_PER_SHARD = 2000


def write_shards(
    source: Path,
    folder: Path,
    *,
    records_per_shard: int = RECORDS_PER_SHARD,
    leave_out_persons: bool = False,
) -> tuple[int, int]:
    """Write the records of a file to compressed Parquet files, which training reads like the file.

    Args:
        source: file of records, as `jakiro synthesize` writes it.
        folder: folder to write, which must not contain Parquet files yet.
        records_per_shard: number of records in each Parquet file; the last one may have fewer.
        leave_out_persons: whether records that seem to name persons are left out.

    Returns:
        The number of records read, and the number of records written.

    Raises:
        ConfigError: the folder contains Parquet files, or cannot be written to.
        DataError: the file cannot be read, or contains nothing to write.
    """
    import pyarrow
    from pyarrow import parquet

    if any(folder.glob("*.parquet")):
        raise ConfigError(
            f"{folder} contains Parquet files",
            expected="a new or empty folder",
            remedy="choose another folder, or remove these files",
        )
    records = _records(source)
    kept = _without_persons(records) if leave_out_persons else records
    if not kept:
        raise DataError(
            f"there is nothing to write from {source}",
            expected="at least one record that can be kept",
            got=f"{len(records)} records",
        )
    ensure_writable_folder(folder)
    for number, start in enumerate(range(0, len(kept), records_per_shard)):
        table = pyarrow.Table.from_pylist(kept[start : start + records_per_shard])
        path = folder / f"part-{number:03}.parquet"
        parquet.write_table(table, path, compression="zstd", compression_level=19)
    return len(records), len(kept)


def _records(source: Path) -> list[dict[str, Any]]:
    (found,) = find_sources([str(source)])
    if not isinstance(found, FileSource):
        raise DataError(f"{source} is not a file", expected="a JSONL, JSON or Parquet file")
    return [record.fields for record in found.records()]


def _without_persons(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [" \n".join(_strings(record)) for record in records]
    common = common_words(texts)
    pairs = zip(records, texts, strict=True)
    return [record for record, text in pairs if not names_person(text, common)]


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a nested record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)
