"""Training data in compressed Parquet files, with or without records that seem to name persons.

A name is assumed to be two successive capitalized words that are hardly ever written in lower case,
or a capitalized word after a title or initials. Names of places and works are found as well. Names
of a single word, and names that consist of ordinary words, are not found.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from jakiro.errors import ConfigError, DataError
from jakiro.utils.files import ensure_writable_folder, is_disk_full, written_folder
from training.data.chat import CUT, SYSTEM, TURN_KEYS
from training.data.documents import FORMS
from training.data.sources import find_sources

_WORD = re.compile(r"[^\W\d_]+(?:[-'\u2019][^\W\d_]+)*")
_NAME = r"[^\W\d_a-z]['\u2019]?[^\W\d_]*[^\W\d_A-Z]{2}"  # also "O'Brien" and "Émile"
_PAIR = re.compile(
    rf"\b({_NAME}(?:-{_NAME})?) (?:[A-Z]\. )*(?:(?:van|von|de|da|la|bin|al) )*(?=({_NAME}))"
)
_TITLED = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sir|Dame|Lord|Lady|Saint|St|Pope|King|Queen|Prince|Princess|Emperor|"
    r"President|Senator|Chancellor|Professor|Doctor|Captain|General)\.? [A-Z][^\W\d_A-Z]+"
)
_INITIALS = re.compile(r"\b[A-Z]\.(?: ?[A-Z]\.)* [A-Z][^\W\d_A-Z]{2,}")  # as in "J. R. Smith"


def write_shards(
    source: Path,
    folder: Path,
    *,
    records_per_shard: int = 5000,
    leave_out_persons: bool = False,
) -> tuple[int, int]:
    """Write records to compressed Parquet files, which training reads like the original."""
    folder = ensure_writable_folder(folder).resolve()
    if any(folder.iterdir()):
        raise ConfigError(
            f"{folder} contains files",
            expected="a new or empty folder",
            remedy="choose another folder, or remove these files",
        )
    _ensure_replaceable(folder)
    records = _records(source)
    kept = _without_persons(records) if leave_out_persons else records
    if not kept:
        raise DataError(
            f"{source} contains nothing to write",
            expected="at least one record that is kept",
            got=f"{len(records)} records, none of them kept",
            remedy="add records that name no person",
        )
    try:
        with written_folder(folder) as partial:
            partial.mkdir()
            for number, start in enumerate(range(0, len(kept), records_per_shard)):
                path = partial / f"part-{number:03}.parquet"
                _write_table(kept[start : start + records_per_shard], path, source)
    except OSError as error:
        raise DataError(
            f"cannot write the records of {source} to {folder}",
            got=error,
            remedy="free disk space, or choose another folder"
            if is_disk_full(error)
            else _new_folder_in(folder),
        ) from error
    return len(records), len(kept)


def _ensure_replaceable(folder: Path) -> None:
    """Raise an error if a finished folder cannot take the place of this empty one."""
    if folder.is_mount():
        got = "a mount point"
    elif not os.access(folder.parent, os.W_OK | os.X_OK):
        got = f"no permission to write into {folder.parent}"
    else:
        return
    raise ConfigError(
        f"cannot replace {folder} by the folder of finished files",
        expected="a folder that can be renamed",
        got=got,
        remedy=_new_folder_in(folder),
    )


def _new_folder_in(folder: Path) -> str:
    return f"choose a new folder in it, such as {folder / 'shards'}"


def _write_table(records: Sequence[dict[str, Any]], path: Path, source: Path) -> None:
    """Write records with any keys; a key that a record lacks is null in the table."""
    from pyarrow import ArrowException, Table
    from pyarrow.parquet import write_table

    keys = list(dict.fromkeys(key for record in records for key in record))
    columns = {key: [record.get(key) for record in records] for key in keys}
    try:
        table = Table.from_pydict(columns)
    except ArrowException as error:
        raise _no_table(source, error) from error
    for record, kept in zip(records, table.to_pylist(), strict=True):
        if _read(record) != _read(kept):
            raise _no_table(source, "objects with different keys, such as arguments of tools")
    write_table(table, path, compression="zstd", compression_level=19)


def _no_table(source: Path, got: object) -> DataError:
    return DataError(
        f"cannot write the records of {source} as a table",
        expected="records in which each key always has values of the same type",
        got=got,
        remedy="keep these records in JSONL",
    )


def _read(record: dict[str, Any]) -> str:
    """Return what training reads of a record, as JSON, in which 1 and 1.0 are different."""
    read = {key: record.get(key) for key in (*FORMS, "tools", SYSTEM, CUT)}
    for form in ("messages", "conversations"):
        turns = read[form]
        read[form] = list(map(_turn, turns)) if isinstance(turns, list) else turns
    return json.dumps(read, default=str)


def _turn(turn: Any) -> Any:
    """Return the keys of a turn that training reads, in a fixed order; null is no value."""
    if not isinstance(turn, dict):
        return turn
    return {key: _texts_of(turn[key]) for key in TURN_KEYS if turn.get(key) is not None}


def _texts_of(value: Any) -> Any:
    """Return the texts of a content in parts, and any other value unchanged."""
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return [part["text"] for part in value]
    return value


def _records(source: Path) -> list[dict[str, Any]]:
    return [record.fields for found in find_sources([str(source)]) for record in found.records()]


def _without_persons(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [" \n".join(_strings(record)) for record in records]
    common = common_words(texts)
    pairs = zip(records, texts, strict=True)
    return [record for record, text in pairs if not names_person(text, common)]


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a nested value, except for keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)


def common_words(texts: Iterable[str]) -> frozenset[str]:
    """Return the words, lowercased, that are in lower case in at least 10% of their occurrences."""
    words: Counter[str] = Counter()
    lower: Counter[str] = Counter()
    for text in texts:
        for word in _WORD.findall(text):
            words[word.lower()] += 1
            lower[word] += word.islower()
    return frozenset(word for word, count in words.items() if 10 * lower[word] >= count)


def names_person(text: str, common: Set[str]) -> bool:
    """Return whether the text seems to name a person."""
    if _TITLED.search(text) or _INITIALS.search(text):
        return True
    return any(
        all(word[0].isupper() and word.lower() not in common for word in pair)
        for pair in _PAIR.findall(text)
    )
