"""Trigram counts of a corpus in bounded memory, and the file of its most frequent trigrams."""

from pathlib import Path
from typing import Final, Literal

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors
from transformers import PreTrainedTokenizerBase

from inference.drafters.aded.table import MAX_VOCABULARY, TOKEN_BITS, TrigramIndex
from jakiro.errors import CheckpointError, TargetMismatch
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.files import write_atomically
from jakiro.utils.settings import Settings
from jakiro.utils.wording import summary_of

_CHUNK: Final = 1 << 20  # number of trigrams that are counted at once
_MISSING: Final = -1  # the id where there is no successor
_RECORD: Final = "trigrams"  # key of the record in the file's metadata


class TrigramCounter:
    """Counts trigrams; counts are exact if at most `max_trigrams` different trigrams occur.

    Args:
        max_trigrams: largest number of different trigrams; when there are more, the rarest ones
            are discarded.
    """

    def __init__(self, max_trigrams: int = 1 << 24) -> None:
        self.max_trigrams = max_trigrams
        self.num_tokens = self.num_trigrams = 0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._waiting: list[Int64[np.ndarray, " trigrams"]] = []
        self._num_waiting = 0

    def add(self, token_ids: Int32[np.ndarray, " tokens"] | Int64[np.ndarray, " tokens"]) -> None:
        self.num_tokens += len(token_ids)
        ids = np.asarray(token_ids, np.int64)
        trigrams = (ids[:-2] << TOKEN_BITS | ids[1:-1]) << TOKEN_BITS | ids[2:]
        self._waiting.append(trigrams)
        self._num_waiting += len(trigrams)
        self.num_trigrams += len(trigrams)
        if self._num_waiting >= _CHUNK:
            self._merge()

    def index(self, max_bigrams: int, num_successors: int = 12) -> TrigramIndex:
        """Return the most frequent bigrams and their most frequent successors.

        Weights are relative frequencies among all successors of a bigram. Of bigrams or tokens with
        the same frequency, those with smaller ids are preferred.
        """
        self._merge()
        bigrams, row = np.unique(self._keys >> TOKEN_BITS, return_inverse=True)
        totals = np.bincount(row, self._counts, minlength=len(bigrams))
        kept = np.sort(np.argsort(-totals, kind="stable")[:max_bigrams])
        ids = np.full((len(kept), num_successors), _MISSING, np.int32)
        weights = np.zeros(ids.shape, np.float32)
        order = np.lexsort((-self._counts, row))
        column = np.arange(len(order)) - np.searchsorted(row, np.arange(len(bigrams)))[row]
        new_row = np.full(len(bigrams), -1)
        new_row[kept] = np.arange(len(kept))
        is_kept = (column < num_successors) & (new_row[row] >= 0)
        at, trigrams = (new_row[row][is_kept], column[is_kept]), order[is_kept]
        ids[at] = self._keys[trigrams] & (MAX_VOCABULARY - 1)
        weights[at] = self._counts[trigrams] / totals[row[trigrams]]
        return TrigramIndex(bigrams[kept], ids, weights)

    def _merge(self) -> None:
        """Count the waiting trigrams, and discard the rarest if there are too many."""
        if not self._waiting:
            return
        new = np.concatenate(self._waiting)
        self._waiting, self._num_waiting = [], 0
        keys, inverse = np.unique(np.concatenate((self._keys, new)), return_inverse=True)
        ones = np.ones(len(new), np.int64)
        counts = np.bincount(inverse, np.concatenate((self._counts, ones))).astype(np.int64)
        if len(keys) > self.max_trigrams:
            kept = np.sort(np.argsort(-counts, kind="stable")[: self.max_trigrams])
            keys, counts = keys[kept], counts[kept]
        self._keys, self._counts = keys, counts


class TrigramRecord(Settings):
    """The metadata of a file of trigrams."""

    version: Literal[1] = 1
    tokenizer_fingerprint: str
    vocab_size: int
    num_tokens: int  # number of tokens in the corpus; 0 if it is unknown


def save_trigrams(
    index: TrigramIndex, path: Path, tokenizer: PreTrainedTokenizerBase, num_tokens: int = 0
) -> None:
    """Store an index atomically as a safetensors file."""
    record = TrigramRecord(
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
        num_tokens=num_tokens,
    )
    tensors = {"keys": index.keys, "ids": index.ids, "weights": index.weights}
    metadata = {_RECORD: record.model_dump_json()}
    write_atomically(path, safetensors.save(tensors, metadata))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id + 1, which exceeds `len(tokenizer)` if ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def load_trigrams(
    path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> TrigramIndex:
    """Read an index that `save_trigrams` has stored.

    Args:
        vocab_size: size of the target's vocabulary. The tokenizer may have larger token ids;
            trigrams with such ids are left out. None to keep all trigrams.

    Raises:
        CheckpointError: the file is missing or damaged, or is not a file of trigrams.
        TargetMismatch: the trigrams were counted with a tokenizer other than the target's.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = (file.metadata() or {}).get(_RECORD, "")
            record = TrigramRecord.model_validate_json(metadata)
            keys, ids, weights = (file.get_tensor(name) for name in ("keys", "ids", "weights"))
    except (OSError, SafetensorError, ValidationError) as error:
        raise CheckpointError(
            f"cannot load trigrams from {path}",
            expected="a file that `jakiro prepare trigrams` wrote",
            got=summary_of(error),
            remedy="check the path, or build the file again",
        ) from error
    got = tokenizer_fingerprint(tokenizer)
    if record.tokenizer_fingerprint != got:
        raise TargetMismatch(
            f"the trigrams in {path} were counted with a tokenizer other than the target's",
            expected=f"a tokenizer with {record.vocab_size} tokens and the hash stored in the file",
            got=f"{len(tokenizer)} tokens and a different hash",
            remedy="build the file again with the target's tokenizer (`jakiro prepare trigrams`)",
        )
    if vocab_size is not None and vocab_size < record.vocab_size:
        weights = np.where(ids < vocab_size, weights, np.float32(0.0))
    return TrigramIndex(keys, ids, weights)
