"""A table of trigrams that learns, of bounded size, in arrays (ADED, arXiv 2407.12021)."""

from threading import Lock

import numpy as np
from jaxtyping import Bool, Float32, Int64

from inference.drafters.bigram_places import BigramPlaces
from inference.drafters.trigram_index import (
    MAX_VOCABULARY,
    NO_SUCCESSOR,
    TOKEN_BITS,
    Successors,
    TrigramIndex,
    successors_at,
)


class TrigramTable:
    """`M[(a, b)] -> {c: weight}`, upon an index that stays as it is; threads may share it.

    A bigram that is learnt from takes its row of the index along and is looked up here from then
    on; when it is evicted, the index's row counts again. Memory is taken once: 16 bytes for each
    bigram and 8 for each of its successors.

    Args:
        max_bigrams: the most that are kept.
        num_successors: the most that each has; what was seen last and weighs most stays.
        max_weight: at which a weight stops growing.
        decay: what is left of a bigram's weights each time that it is learnt from.
        below: what was known before, or None.
    """

    def __init__(
        self,
        max_bigrams: int,
        num_successors: int = 12,
        max_weight: float = 3.0,
        decay: float = 1.0,
        below: TrigramIndex | None = None,
    ) -> None:
        self.num_successors = num_successors
        self.max_weight = max_weight
        self.decay = decay
        self.below = None if below is None else below.narrowed(num_successors)
        self._places = BigramPlaces(max_bigrams)
        # A lazily mapped page of zeros costs nothing until it is written.
        self._ids = np.zeros((self._places.size, num_successors), np.int32)
        self._weights = np.zeros((self._places.size, num_successors), np.float32)
        self._lock = Lock()

    @property
    def num_bigrams(self) -> int:
        """Bigrams that were learnt and not evicted."""
        return self._places.num_taken

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, however much is learnt; the index below not included."""
        return self._places.num_bytes + self._ids.nbytes + self._weights.nbytes

    def lookup(self, bigrams: Int64[np.ndarray, " bigrams"]) -> Successors:
        """Return the successors of packed bigrams."""
        with self._lock:
            return self._lookup(bigrams)

    def row(self, first: int, second: int) -> tuple[list[int], list[float]]:
        """Return the tokens that follow two others, and their weights."""
        with self._lock:
            place = self._places.find_one((first << TOKEN_BITS) | second)
            if place is not None:
                return successors_at(Successors(self._ids, self._weights), place)
        if self.below is None:
            return [], []
        return self.below.row(first, second)

    def add(
        self,
        bigrams: Int64[np.ndarray, " trigrams"],
        successors: Int64[np.ndarray, " trigrams"],
        amounts: Float32[np.ndarray, " trigrams"],
    ) -> None:
        """Make trigrams heavier, each time that they are given; unknown ones are created.

        Of a bigram with too many successors those given now stay, the heaviest first, then the
        heaviest of the others; of equals the smallest token. Amounts that are not above 0 teach
        nothing.
        """
        is_given = amounts > 0
        if not is_given.any():
            return
        bigrams, successors, amounts = bigrams[is_given], successors[is_given], amounts[is_given]
        keys, which = np.unique(bigrams, return_inverse=True)
        with self._lock:
            before = self._lookup(keys)
            places = self._places.claim(keys)
            rows = self._grown(before, which, successors, amounts)
            has_place = places >= 0
            self._ids[places[has_place]] = rows.ids[has_place]
            self._weights[places[has_place]] = rows.weights[has_place]

    def clear(self) -> None:
        """Forget everything but the index below."""
        with self._lock:
            self._places.clear()

    def frozen(self, max_bigrams: int | None = None) -> TrigramIndex:
        """Return what is known now, the index below included, as an index.

        Args:
            max_bigrams: the most that it has, those that were learnt first of all, the latest of
                them; None for all. Whoever learns upon what was learnt before bounds it so.
        """
        with self._lock:
            keys, learnt_at = self._places.taken()
            if self.below is not None:
                others = np.setdiff1d(self.below.keys, keys)
                keys = np.concatenate((keys, others))
                learnt_at = np.concatenate((learnt_at, np.zeros_like(others)))
            keys = np.sort(keys[np.argsort(-learnt_at, kind="stable")[:max_bigrams]])
            return TrigramIndex(keys, self._lookup(keys))

    def _lookup(self, bigrams: Int64[np.ndarray, " n"]) -> Successors:
        places = self._places.find(bigrams)
        ids, weights = self._ids[places], self._weights[places]
        is_missing = places < 0
        if is_missing.any():
            if self.below is None:
                ids[is_missing], weights[is_missing] = NO_SUCCESSOR, 0.0
            else:
                ids[is_missing], weights[is_missing] = self._padded(bigrams[is_missing])
        return Successors(ids, weights)

    def _padded(self, bigrams: Int64[np.ndarray, " n"]) -> Successors:
        """Return rows of the index below, padded to as many successors as there are here."""
        assert self.below is not None
        found = self.below.lookup(bigrams)
        padded = Successors.none(len(bigrams), self.num_successors)
        width = found.ids.shape[1]
        padded.ids[:, :width], padded.weights[:, :width] = found
        return padded

    def _grown(
        self,
        before: Successors,
        which: Int64[np.ndarray, " trigrams"],
        successors: Int64[np.ndarray, " trigrams"],
        amounts: Float32[np.ndarray, " trigrams"],
    ) -> Successors:
        """Return rows with the trigrams added; `which` names the row of each."""
        row, column = np.nonzero(before.weights > 0)
        old = before.ids[row, column].astype(np.int64)
        cells = np.concatenate((row * MAX_VOCABULARY + old, which * MAX_VOCABULARY + successors))
        added = np.concatenate((before.weights[row, column] * self.decay, amounts))
        cells, cell_of = np.unique(cells, return_inverse=True)
        weights = np.bincount(cell_of, added).clip(max=self.max_weight).astype(np.float32)
        is_given = np.zeros(len(cells), np.bool_)
        is_given[cell_of[len(old) :]] = True
        return self._heaviest(cells, weights, is_given, len(before.ids))

    def _heaviest(
        self,
        cells: Int64[np.ndarray, " cells"],
        weights: Float32[np.ndarray, " cells"],
        is_given: Bool[np.ndarray, " cells"],
        num_rows: int,
    ) -> Successors:
        row = cells >> TOKEN_BITS
        # Cells are sorted, and so is what is equal otherwise.
        order = np.lexsort((-weights, ~is_given, row))
        place = np.arange(len(cells)) - np.searchsorted(row, np.arange(num_rows))[row]
        is_kept = place < self.num_successors
        kept = order[is_kept]
        rows = Successors.none(num_rows, self.num_successors)
        rows.ids[row[is_kept], place[is_kept]] = cells[kept] & (MAX_VOCABULARY - 1)
        rows.weights[row[is_kept], place[is_kept]] = weights[kept]
        return rows
