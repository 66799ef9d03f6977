"""Tokens of all documents, read once, kept in the cache, and mapped into memory from there."""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from jakiro.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.logs import get_logger
from jakiro.target_record import template_fingerprint, tokenizer_fingerprint
from training.data.documents import Document, encode_documents
from training.data.sources import Source, find_sources

# Part of the fingerprint: to be raised whenever the same rows would become other tokens.
_REVISION = 1

_logger = get_logger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """All documents, one after another.

    Attributes:
        token_ids: of all documents.
        is_response: which tokens the drafter learns to guess.
        starts: where each document begins, and at last where the last one ends.
        fingerprint: of the data and the tokenizer.
    """

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    fingerprint: str

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens in each document."""
        return np.diff(self.starts)

    def document(self, index: int) -> Document:
        """Return the tokens of one document."""
        part = slice(self.starts[index], self.starts[index + 1])
        return Document(self.token_ids[part], self.is_response[part])


def open_tokens(
    paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, cache_folder: Path | None = None
) -> TokenStore:
    """Return the tokens of all documents; read the data unless its tokens are in the cache.

    Of several processes one reads, the others wait for it.

    Args:
        paths: see `find_sources`.
        tokenizer: the target's.
        cache_folder: None for the user's cache.

    Raises:
        DataError: data is missing or malformed, or holds nothing to learn from.
        ConfigError: the cache cannot be written to.
    """
    cache = ensure_writable_folder(cache_folder or user_cache_path("jakiro") / "tokens")
    sources = find_sources(paths)
    identity = _identify(sources, tokenizer)
    home = cache / identity[:32]
    with FileLock(cache / f".{home.name}.lock"):
        if not _is_whole(home):
            partial = cache / f".{home.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            records = (record for source in sources for record in source.records())
            _write(partial, encode_documents(tokenizer, records))
            shutil.rmtree(home, ignore_errors=True)
            partial.rename(home)
    return _map(home, identity)


def _identify(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> str:
    return fingerprint(
        _REVISION,
        [source.fingerprint() for source in sources],
        tokenizer_fingerprint(tokenizer),
        template_fingerprint(tokenizer),
    )


def _write(folder: Path, documents: Iterable[Document]) -> None:
    lengths, num_responses, num_dropped = [], 0, 0
    with (folder / "token_ids").open("wb") as ids, (folder / "is_response").open("wb") as mask:
        for document in documents:
            if len(document.token_ids) < 2:  # nothing follows anything
                num_dropped += 1
                continue
            lengths.append(len(document.token_ids))
            num_responses += int(document.is_response.sum())
            ids.write(document.token_ids.tobytes())
            mask.write(document.is_response.tobytes())
    if num_responses == 0:
        raise DataError(
            "the data holds nothing to learn from",
            expected="documents with response tokens",
            got=f"{len(lengths)} documents without any",
        )
    np.save(folder / "starts.npy", np.cumsum([0, *lengths]))
    _logger.info(
        f"read {sum(lengths):,} tokens ({num_responses:,} of responses) in {len(lengths):,} "
        f"documents; {num_dropped:,} documents without a second token were dropped"
    )
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_atomically(folder / "sizes.json", json.dumps(sizes))


def _is_whole(home: Path) -> bool:
    """Whether all files are there in full; what a crash cut off is read again."""
    try:
        sizes = json.loads((home / "sizes.json").read_bytes())
        return all((home / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _map(home: Path, identity: str) -> TokenStore:
    return TokenStore(
        token_ids=np.memmap(home / "token_ids", np.int32, mode="r"),
        is_response=np.memmap(home / "is_response", np.bool_, mode="r"),
        starts=np.load(home / "starts.npy"),
        fingerprint=identity,
    )
