"""The token store: tokens of all documents, cached on disk and mapped into memory."""

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

from jakiro.target.record import template_fingerprint, tokenizer_fingerprint
from jakiro.utils.files import ensure_writable_folder, fingerprint
from training.data.counts import ReadCounts
from training.data.documents import Document, check_vocabulary, encode_records
from training.data.sources import Intake, Source, find_sources, read_all
from training.data.token_writer import hash_document, write_tokens


@dataclass(frozen=True)
class Locations:
    """Locations of documents in the data: the source and the record of each document.

    Attributes:
        records: for each document, the index of its source, from 0, and the line (JSONL) or index
            (other sources) of its record in that source, from 1, [documents, 2]. Several documents
            may come from one conversation.
    """

    names: tuple[str, ...]
    records: npt.NDArray[np.int64]

    @property
    def first_documents(self) -> npt.NDArray[np.int64]:
        """The index of the first document of each record."""
        is_other = (self.records[1:] != self.records[:-1]).any(axis=1)
        return np.flatnonzero(np.concatenate([[True], is_other]))

    def describe(self, documents: Iterable[int]) -> str:
        """Return the locations of documents in the data, such as `chats.jsonl:12, 15`."""
        records = dict.fromkeys(tuple(self.records[document].tolist()) for document in documents)
        return ", ".join(
            f"{self.names[source]}:{', '.join(str(number) for _, number in same)}"
            for source, same in groupby(records, key=lambda record: record[0])
        )


# This number is part of the fingerprint. Raise it whenever the code changes in such a way that the
# same records are encoded differently.
_REVISION = 4

# Tokenizers with the same vocabulary may encode this text differently, and end texts differently.
_PROBE = "Hello,  wörld: it's 2024!\n\n\tdef f(x_1): return [x_1 ** 2]  # ½ € 中文 🙂 </s>"


@dataclass(frozen=True)
class TokenStore:
    """The tokens of all documents, one document after another.

    Attributes:
        starts: index of the first token of each document, followed by the total number of tokens.
        counts: counts of the data that was read; None for documents without a source.
        known_hashes: hash of each document's tokens; None to compute `hashes` when needed.
    """

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    fingerprint: str
    counts: ReadCounts | None = None
    known_hashes: npt.NDArray[np.uint64] | None = None
    locations: Locations | None = None

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each document."""
        return np.diff(self.starts)

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """The hash of each document's tokens."""
        if self.known_hashes is not None:
            return self.known_hashes
        documents = map(self.document, range(self.num_documents))
        return np.array([hash_document(document) for document in documents], np.uint64)

    @cached_property
    def first_documents(self) -> npt.NDArray[np.int64]:
        """The index of the first document of each record; its other documents follow."""
        if self.locations is None:
            return np.arange(self.num_documents)
        return self.locations.first_documents

    @cached_property
    def is_text(self) -> npt.NDArray[np.bool_]:
        """Whether each document is a text, which means that all of its tokens are in a response."""
        return np.logical_and.reduceat(self.is_response, self.starts[:-1])

    def describe(self, documents: Sequence[int]) -> str:
        """Return the locations of documents, or their numbers, from 1, if they have no source."""
        if self.locations is not None:
            return self.locations.describe(documents)
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
    skip_bad_records: bool = False,
    vocab_size: int | None = None,
) -> TokenStore:
    """Return the token store of the data, from the cache or by reading the data.

    If several processes call this function, one of them reads the data and the others wait.
    """
    cache = ensure_writable_folder(cache_folder or user_cache_path("jakiro") / "tokens")
    sources = find_sources(paths)
    key = _fingerprint(
        sources, tokenizer, vocab_size if skip_bad_records else None, skip_bad_records
    )
    home = cache / key[:32]
    with FileLock(cache / f".{home.name}.lock"):
        if not _is_whole(home):
            intake = Intake(skip_bad_records)
            records = read_all(sources, intake)
            write_tokens(home, encode_records(tokenizer, records, intake, vocab_size), intake)
    store = _map(home, key, sources)
    if store.counts is not None:  # it may have been stored for another target
        check_vocabulary(store.counts.highest_id, "the data", vocab_size)
    return store


def _fingerprint(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    skip_bad_records: bool,
) -> str:
    return fingerprint(
        _REVISION,
        [source.fingerprint() for source in sources],
        tokenizer_fingerprint(tokenizer),
        template_fingerprint(tokenizer),
        _encoding(tokenizer),
        ["skip", vocab_size] if skip_bad_records else None,
    )


def _encoding(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Return the end of texts, and how the tokenizer encodes the probe."""
    try:
        probes = [tokenizer(_PROBE, add_special_tokens=own).input_ids for own in (True, False)]
    except Exception:  # noqa: BLE001 - some tokenizers only know the characters of their data
        probes = []
    return [tokenizer.eos_token_id, *probes]


def _is_whole(home: Path) -> bool:
    """Return whether all cached files have their full size, since a crash may truncate files."""
    try:
        sizes = json.loads((home / "sizes.json").read_bytes())
        return all((home / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _map(home: Path, key: str, sources: Sequence[Source]) -> TokenStore:
    counts = ReadCounts.model_validate_json((home / "counts.json").read_bytes())
    return TokenStore(
        token_ids=np.memmap(home / "token_ids", np.int32, mode="r"),
        is_response=np.memmap(home / "is_response", np.bool_, mode="r"),
        starts=np.load(home / "starts.npy", mmap_mode="r"),
        fingerprint=key,
        counts=counts,
        known_hashes=np.load(home / "hashes.npy", mmap_mode="r"),
        locations=Locations(
            tuple(source.name for source in sources), np.load(home / "locations.npy", mmap_mode="r")
        ),
    )
