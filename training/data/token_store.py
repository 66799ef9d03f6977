"""Tokens of all documents, read once, kept in the cache, and mapped into memory from there."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from jakiro.target.record import template_fingerprint, tokenizer_fingerprint
from jakiro.utils.files import ensure_writable_folder, fingerprint
from training.data.counts import ReadCounts
from training.data.documents import Document, encode_rows
from training.data.sources import Intake, Source, find_sources, read_all
from training.data.token_writer import hash_document, write_tokens


@dataclass(frozen=True)
class Places:
    """The row of data that each document comes from, in the order of the data.

    Attributes:
        names: of the sources, as messages have them.
        rows: for each document the number of its source, from 0, and that of its line (JSONL) or
            row (others) there, from 1. Of a conversation there may be several documents.
    """

    names: tuple[str, ...]
    rows: npt.NDArray[np.int64]

    @property
    def first_documents(self) -> npt.NDArray[np.int64]:
        """The first document of each row of data."""
        is_other = (self.rows[1:] != self.rows[:-1]).any(axis=1)
        return np.flatnonzero(np.concatenate([[True], is_other]))

    def describe(self, documents: Iterable[int]) -> str:
        """Return where documents stand, such as `chats.jsonl:12, 15`."""
        rows = dict.fromkeys(tuple(self.rows[document].tolist()) for document in documents)
        return ", ".join(
            f"{self.names[source]}:{', '.join(str(number) for _, number in same)}"
            for source, same in groupby(rows, key=lambda row: row[0])
        )


# Part of the fingerprint: to be raised whenever the same rows would become other tokens.
_REVISION = 2


@dataclass(frozen=True)
class TokenStore:
    """All documents, one after another.

    Attributes:
        token_ids: of all documents.
        is_response: which tokens the drafter learns to guess.
        starts: where each document begins, and at last where the last one ends.
        fingerprint: of the data and the tokenizer.
        counts: of what was read; None for documents that come from no file.
        known_hashes: see `hashes`; None to compute them.
        places: where the documents stand in the data; None for documents that come from no file.
    """

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    fingerprint: str
    counts: ReadCounts | None = None
    known_hashes: npt.NDArray[np.uint64] | None = None
    places: Places | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens in each document."""
        return np.diff(self.starts)

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """A hash of each document's tokens."""
        if self.known_hashes is not None:
            return self.known_hashes
        documents = map(self.document, range(self.num_documents))
        return np.array([hash_document(document) for document in documents], np.uint64)

    @cached_property
    def first_documents(self) -> npt.NDArray[np.int64]:
        """The first document of each row of data; the others of a row follow it."""
        if self.places is None:
            return np.arange(self.num_documents)
        return self.places.first_documents

    @cached_property
    def is_text(self) -> npt.NDArray[np.bool_]:
        """Which documents are plain texts: all response, with nothing that asks for it."""
        return np.logical_and.reduceat(self.is_response, self.starts[:-1])

    def describe(self, documents: Sequence[int]) -> str:
        """Return where documents stand in the data; counted from 1 if they come from no file."""
        if self.places is not None:
            return self.places.describe(documents)
        return f"documents {', '.join(str(document + 1) for document in documents)}"

    def document(self, index: SupportsIndex) -> Document:
        """Return the tokens of one document."""
        begin, end = self.starts[int(index) : int(index) + 2]
        part = slice(begin, end)
        return Document(self.token_ids[part], self.is_response[part])


def open_tokens(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: Path | None = None,
    *,
    skip_bad_rows: bool = False,
    vocab_size: int | None = None,
) -> TokenStore:
    """Return the tokens of all documents; read the data unless its tokens are in the cache.

    Of several processes one reads, the others wait for it.

    Args:
        paths: see `find_sources`.
        tokenizer: the target's.
        cache_folder: None for the user's cache.
        skip_bad_rows: leave unusable rows out and count them.
        vocab_size: of the target, if it is known.

    Raises:
        DataError: data is missing or malformed, or holds nothing to learn from, or tokens that the
            target does not have.
        ConfigError: the cache cannot be written to.
        ResourceError: its disk is full.
    """
    cache = ensure_writable_folder(cache_folder or user_cache_path("jakiro") / "tokens")
    sources = find_sources(paths)
    identity = _identify(sources, tokenizer, vocab_size if skip_bad_rows else None, skip_bad_rows)
    home = cache / identity[:32]
    with FileLock(cache / f".{home.name}.lock"):
        if not _is_whole(home):
            intake = Intake(skip_bad_rows)
            records = read_all(sources, intake)
            write_tokens(home, encode_rows(tokenizer, records, intake, vocab_size), intake)
    return _checked(_map(home, identity, sources), vocab_size)


def _identify(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    skip_bad_rows: bool,
) -> str:
    return fingerprint(
        _REVISION,
        [source.fingerprint() for source in sources],
        tokenizer_fingerprint(tokenizer),
        template_fingerprint(tokenizer),
        ["skip", vocab_size] if skip_bad_rows else None,
    )


def _is_whole(home: Path) -> bool:
    """Whether all files are there in full; what a crash cut off is read again."""
    try:
        sizes = json.loads((home / "sizes.json").read_bytes())
        return all((home / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _map(home: Path, identity: str, sources: Sequence[Source]) -> TokenStore:
    counts = ReadCounts.model_validate_json((home / "counts.json").read_bytes())
    return TokenStore(
        token_ids=np.memmap(home / "token_ids", np.int32, mode="r"),
        is_response=np.memmap(home / "is_response", np.bool_, mode="r"),
        starts=np.load(home / "starts.npy", mmap_mode="r"),
        fingerprint=identity,
        counts=counts,
        known_hashes=np.load(home / "hashes.npy", mmap_mode="r"),
        places=Places(
            tuple(source.name for source in sources), np.load(home / "rows.npy", mmap_mode="r")
        ),
    )


def _checked(store: TokenStore, vocab_size: int | None) -> TokenStore:
    highest = 0 if store.counts is None else store.counts.highest_id
    if vocab_size is not None and highest >= vocab_size:  # read for another target
        raise DataError(
            "the data has a token that the target does not have",
            expected=f"ids from 0 to {vocab_size - 1}",
            got=highest,
            remedy="use the target's own tokenizer",
        )
    return store
