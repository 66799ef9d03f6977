"""Trigrams: the index of those of a corpus, with its file, and a table that adapts to texts."""

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Final, Literal

import numpy as np
from jaxtyping import Float32, Int32, Int64
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors
from transformers import PreTrainedTokenizerBase

from jakiro.errors import CheckpointError, TargetMismatch
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.files import write_atomically
from jakiro.utils.settings import Settings
from jakiro.utils.wording import summary_of

TOKEN_BITS: Final = 21  # number of bits of a token id in a packed bigram or trigram
MAX_VOCABULARY: Final = 1 << TOKEN_BITS  # three tokens fit into 63 bits
_CHUNK: Final = 1 << 20  # number of trigrams that are counted at once
_MISSING: Final = -1  # the id where there is no successor
_RECORD: Final = "trigrams"  # key of the record in the file's metadata

Row = dict[int, float]  # weights of the tokens that follow a bigram, in order of preference


class TrigramIndex:
    """An immutable table of the successors of bigrams; thread-safe.

    Args:
        keys: packed bigrams in ascending order.
        weights: weights of the successors in `ids`; 0 where there is none.
    """

    def __init__(
        self,
        keys: Int64[np.ndarray, " bigrams"],
        ids: Int32[np.ndarray, "bigrams successors"],
        weights: Float32[np.ndarray, "bigrams successors"],
    ) -> None:
        self.keys, self.ids, self.weights = keys, ids, weights

    def row(self, first: int, second: int) -> Row:
        bigram = first << TOKEN_BITS | second
        at = int(self.keys.searchsorted(bigram))
        if at == len(self.keys) or self.keys[at] != bigram:
            return {}
        pairs = zip(self.ids[at].tolist(), self.weights[at].tolist(), strict=True)
        return {token: weight for token, weight in pairs if weight > 0}


class TrigramTable:
    """An adaptive table `M[(a, b)] -> {c: weight}` on top of an immutable index; thread-safe.

    When a bigram is first learned, its successors are copied from the index. From then on, the
    bigram is looked up in this table; after its eviction, it is looked up in the index again. The
    bigram that was learned the longest time ago is evicted first.

    Args:
        num_successors: largest number of successors of each bigram; the latest are kept first, then
            the heaviest.
    """

    def __init__(
        self,
        max_bigrams: int,
        num_successors: int = 12,
        max_weight: float = 3.0,
        below: TrigramIndex | None = None,
    ) -> None:
        self.max_bigrams = max_bigrams
        self.num_successors = num_successors
        self.max_weight = max_weight
        self.below = below
        self._rows: OrderedDict[tuple[int, int], Row] = OrderedDict()  # learned last at the end
        self._lock = Lock()

    def row(self, first: int, second: int) -> Row:
        with self._lock:
            row = self._rows.get((first, second))
        return self._row_below(first, second) if row is None else row

    def add(self, token_ids: Int64[np.ndarray, " tokens"], step: float) -> None:
        """Add the weight `step` to a trigram at each of its occurrences in a text.

        If a bigram gets too many successors, those in the text are kept first, then the heaviest
        earlier ones. Of successors with the same weight, those with the smallest tokens are kept.
        """
        gained: dict[tuple[int, int], Row] = {}
        tokens, amount = token_ids.tolist(), _rounded(step)
        for first, second, token in zip(tokens, tokens[1:], tokens[2:], strict=False):
            row = gained.setdefault((first, second), {})
            row[token] = row.get(token, 0.0) + amount
        with self._lock:
            for bigram, new in gained.items():
                old = self._rows.pop(bigram, None)
                self._rows[bigram] = self._grown(old or self._row_below(*bigram), new)
                if len(self._rows) > self.max_bigrams:
                    self._rows.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()

    def _grown(self, row: Row, gained: Row) -> Row:
        """Return a row after some of its successors have gained weight."""
        most = self.max_weight
        met = [
            (-_rounded(min(min(row.get(token, 0.0), most) + more, most)), token)
            for token, more in gained.items()
        ]
        rest = [(-min(weight, most), token) for token, weight in row.items() if token not in gained]
        kept = [*sorted(met), *sorted(rest)][: self.num_successors]
        return {token: -weight for weight, token in kept}

    def _row_below(self, first: int, second: int) -> Row:
        row = {} if self.below is None else self.below.row(first, second)
        if len(row) <= self.num_successors:
            return row
        heaviest = sorted(row.items(), key=lambda pair: -pair[1])
        return dict(heaviest[: self.num_successors])


def _rounded(weight: float) -> float:
    """Return a weight in float32, in which weights that grew in different steps can be equal."""
    return float(np.float32(weight))


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
    version: Literal[1] = 1
    tokenizer_fingerprint: str
    vocab_size: int
    num_tokens: int  # number of tokens in the corpus; 0 if it is unknown


def save_trigrams(
    index: TrigramIndex, path: Path, tokenizer: PreTrainedTokenizerBase, num_tokens: int = 0
) -> None:
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
