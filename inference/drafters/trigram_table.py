"""A table of trigrams that learns, of bounded size, in arrays (ADED, arXiv 2407.12021)."""

from threading import Lock

import numpy as np
from jaxtyping import Float32, Int64

from inference.drafters.bigram_places import BigramPlaces
from inference.drafters.trigram_growth import Met, grown
from inference.drafters.trigram_index import (
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
        if is_given.any():
            self._learn(Met.of(bigrams[is_given], successors[is_given], amounts[is_given]))

    def add_rows(
        self,
        bigrams: Int64[np.ndarray, " bigrams"],
        successors: Int64[np.ndarray, "bigrams each"],
        amounts: Float32[np.ndarray, "bigrams each"],
    ) -> None:
        """Do as `add` does with several successors of each bigram, at less expense.

        Args:
            bigrams: each counts as often as it has successors.
            successors: different ones of each bigram.
            amounts: of each of them.
        """
        if not bigrams.size:
            return
        if amounts.min() > 0 and len(set(bigrams.tolist())) == len(bigrams):
            self._learn(Met.of_rows(bigrams, successors, amounts))
        else:
            each = bigrams.repeat(successors.shape[1])
            self.add(each, successors.ravel(), amounts.ravel())

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

    def _learn(self, met: Met) -> None:
        with self._lock:
            found = self._places.find(met.bigrams)
            before = self._rows_at(found, met.bigrams)
            places = self._places.claim(met.bigrams, found)
            ids, weights = grown(before, met, self.max_weight, self.decay)
            has_place = places >= 0
            if not has_place.all():
                places, ids, weights = places[has_place], ids[has_place], weights[has_place]
            self._ids[places] = ids
            self._weights[places] = weights

    def _lookup(self, bigrams: Int64[np.ndarray, " n"]) -> Successors:
        return self._rows_at(self._places.find(bigrams), bigrams)

    def _rows_at(
        self, places: Int64[np.ndarray, " n"], bigrams: Int64[np.ndarray, " n"]
    ) -> Successors:
        """Return the successors of bigrams whose places, or -1, are known."""
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
        padded.ids[padded.weights == 0] = NO_SUCCESSOR  # a file may say anything there
        return padded
