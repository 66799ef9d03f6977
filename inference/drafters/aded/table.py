"""Trigrams: an immutable index of those of a corpus, and a table that adapts to texts."""

from collections import OrderedDict
from threading import Lock
from typing import Final

import numpy as np
from jaxtyping import Float32, Int32, Int64

TOKEN_BITS: Final = 21  # number of bits of a token id in a packed bigram or trigram
MAX_VOCABULARY: Final = 1 << TOKEN_BITS  # three tokens fit into 63 bits

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
        """Return the weights of the tokens that follow a pair of tokens."""
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
        """Return the weights of the tokens that follow a pair of tokens."""
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
        """Discard everything except the underlying index."""
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
