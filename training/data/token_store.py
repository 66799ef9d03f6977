"""Tokens of all documents, read once, kept in the cache, and mapped into memory from there."""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from jakiro.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.target_record import template_fingerprint, tokenizer_fingerprint
from training.data.counts import ReadCounts
from training.data.documents import Document, encode_documents
from training.data.intake import Intake
from training.data.rendering import reads_clock
from training.data.sources import Source, find_sources

# Part of the fingerprint: to be raised whenever the same rows would become other tokens.
_REVISION = 1


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
    """

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    fingerprint: str
    counts: ReadCounts | None = None
    known_hashes: npt.NDArray[np.uint64] | None = None

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
        return np.array([_hash(document) for document in documents], np.uint64)

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
    """
    cache = ensure_writable_folder(cache_folder or user_cache_path("jakiro") / "tokens")
    sources = find_sources(paths)
    identity = _identify(sources, tokenizer, vocab_size if skip_bad_rows else None, skip_bad_rows)
    home = cache / identity[:32]
    with FileLock(cache / f".{home.name}.lock"):
        if not _is_whole(home):
            partial = cache / f".{home.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            intake = Intake(skip_bad_rows)
            records = (record for source in sources for record in source.records(intake))
            _write(partial, encode_documents(tokenizer, records, intake, vocab_size), intake)
            shutil.rmtree(home, ignore_errors=True)
            partial.rename(home)
    return _checked(_map(home, identity), vocab_size)


def _identify(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    skip_bad_rows: bool,
) -> str:
    # What an earlier version did not know is part only where it makes a difference: run folders of
    # that version go on.
    return fingerprint(
        _REVISION,
        [source.fingerprint() for source in sources],
        tokenizer_fingerprint(tokenizer),
        template_fingerprint(tokenizer),
        *([["skip", vocab_size]] if skip_bad_rows else []),
        *(["stopped clock"] if reads_clock(tokenizer) else []),
    )


def _write(folder: Path, documents: Iterable[Document], intake: Intake) -> None:
    starts, hashes = array("q", [0]), array("Q")
    num_responses, num_dropped, highest_id = 0, 0, 0
    with (folder / "token_ids").open("wb") as ids, (folder / "is_response").open("wb") as mask:
        for document in documents:
            if len(document.token_ids) < 2:  # nothing follows anything
                num_dropped += 1
                continue
            starts.append(starts[-1] + len(document.token_ids))
            hashes.append(_hash(document))
            num_responses += int(document.is_response.sum())
            highest_id = max(highest_id, int(document.token_ids.max()))
            ids.write(document.token_ids.tobytes())
            mask.write(document.is_response.tobytes())
    counts = ReadCounts(
        rows=intake.rows,
        skipped=intake.skipped,
        dropped=num_dropped,
        documents=len(hashes),
        tokens=starts[-1],
        responses=num_responses,
        rich=intake.rich,
        highest_id=highest_id,
    )
    if num_responses == 0:
        raise DataError(
            "the data holds nothing to learn from",
            expected="documents with response tokens",
            got=f"{counts.documents} documents without any, {counts.skipped} rows skipped",
        )
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
    write_atomically(folder / "counts.json", counts.model_dump_json())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_atomically(folder / "sizes.json", json.dumps(sizes))


def _hash(document: Document) -> int:
    digest = hashlib.sha256(document.token_ids.tobytes()).digest()
    return int.from_bytes(digest[:8], "big")


def _is_whole(home: Path) -> bool:
    """Whether all files are there in full; what a crash cut off is read again."""
    try:
        sizes = json.loads((home / "sizes.json").read_bytes())
        is_known = "counts.json" in sizes  # an earlier version did not count
        return is_known and all(
            (home / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError):
        return False


def _map(home: Path, identity: str) -> TokenStore:
    counts = ReadCounts.model_validate_json((home / "counts.json").read_bytes())
    return TokenStore(
        token_ids=np.memmap(home / "token_ids", np.int32, mode="r"),
        is_response=np.memmap(home / "is_response", np.bool_, mode="r"),
        starts=np.load(home / "starts.npy", mmap_mode="r"),
        # An earlier version read of a turn no more than role and content.
        fingerprint=fingerprint(identity, "rich turns") if counts.rich else identity,
        counts=counts,
        known_hashes=np.load(home / "hashes.npy", mmap_mode="r"),
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
