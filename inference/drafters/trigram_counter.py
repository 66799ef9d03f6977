"""Counts trigrams of a corpus in bounded memory, and makes an index of the most frequent ones."""

from typing import Final

import numpy as np
from jaxtyping import Int32, Int64

from inference.drafters.trigram_index import (
    MAX_VOCABULARY,
    TOKEN_BITS,
    Successors,
    TrigramIndex,
    trigrams_of,
)

CHUNK: Final = 1 << 20  # trigrams that are counted at once


class TrigramCounter:
    """Counts of trigrams, exact until there are more different ones than fit.

    Args:
        max_trigrams: different ones that are remembered; beyond, the rarest are forgotten.
    """

    def __init__(self, max_trigrams: int = 1 << 24) -> None:
        self.max_trigrams = max_trigrams
        self.num_tokens = self.num_trigrams = 0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._waiting: list[Int64[np.ndarray, " trigrams"]] = []
        self._num_waiting = 0

    def add(self, token_ids: Int32[np.ndarray, " tokens"] | Int64[np.ndarray, " tokens"]) -> None:
        """Count the trigrams of a text."""
        self.num_tokens += len(token_ids)
        bigrams, successors = trigrams_of(token_ids)
        if not len(bigrams):
            return
        self._waiting.append(bigrams << TOKEN_BITS | successors)
        self._num_waiting += len(bigrams)
        self.num_trigrams += len(bigrams)
        if self._num_waiting >= CHUNK:
            self._merge()

    def index(self, max_bigrams: int, num_successors: int = 12) -> TrigramIndex:
        """Return the most frequent bigrams and their likeliest successors.

        Weights are relative frequencies among all successors of a bigram; of equals the smaller
        bigram or token counts as the more frequent one.
        """
        self._merge()
        bigrams, row = np.unique(self._keys >> TOKEN_BITS, return_inverse=True)
        totals = np.bincount(row, self._counts, minlength=len(bigrams))
        kept = np.sort(np.argsort(-totals, kind="stable")[:max_bigrams])
        rows = Successors.none(len(kept), num_successors)
        order = np.lexsort((-self._counts, row))
        place = np.arange(len(order)) - np.searchsorted(row, np.arange(len(bigrams)))[row]
        new_row = np.full(len(bigrams), -1)
        new_row[kept] = np.arange(len(kept))
        is_kept = (place < num_successors) & (new_row[row] >= 0)
        at, chosen = (new_row[row][is_kept], place[is_kept]), order[is_kept]
        rows.ids[at] = self._keys[chosen] & (MAX_VOCABULARY - 1)
        rows.weights[at] = self._counts[chosen] / totals[row[chosen]]
        return TrigramIndex(bigrams[kept], rows)

    def _merge(self) -> None:
        """Count what waits, and forget the rarest trigrams if there are too many."""
        if not self._waiting:
            return
        new = np.concatenate(self._waiting)
        self._waiting, self._num_waiting = [], 0
        keys, which = np.unique(np.concatenate((self._keys, new)), return_inverse=True)
        ones = np.ones(len(new), np.int64)
        counts = np.bincount(which, np.concatenate((self._counts, ones))).astype(np.int64)
        if len(keys) > self.max_trigrams:
            kept = np.sort(np.argsort(-counts, kind="stable")[: self.max_trigrams])
            keys, counts = keys[kept], counts[kept]
        self._keys, self._counts = keys, counts
