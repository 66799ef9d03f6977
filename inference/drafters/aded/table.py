"""An adaptive table of trigrams in bounded memory."""

from threading import Lock
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from inference.drafters.aded.index import (
    MAX_VOCABULARY,
    NO_SUCCESSOR,
    TOKEN_BITS,
    Successors,
    TrigramIndex,
    successors_at,
)
from inference.drafters.aded.slots import BigramSlots

# The sort key of a successor contains, from the highest bit: one bit that is 1 if the successor
# was known before but does not occur now; 31 bits that are larger for smaller weights; the token.
_KNOWN: Final = 1 << (31 + TOKEN_BITS)
_LIGHTEST: Final = (1 << 31) - 1  # larger than the bits of any positive float32
_MISSING: Final = _KNOWN | _LIGHTEST << TOKEN_BITS  # a weight of 0, sorted after all others


class Met(NamedTuple):
    """Different trigrams that occurred, and the weight that each trigram gains."""

    bigrams: Int64[np.ndarray, " rows"]  # distinct, ascending
    row: Int64[np.ndarray, " trigrams"]  # index of each trigram's bigram
    column: Int64[np.ndarray, " trigrams"]  # index among the trigrams of the bigram
    successors: Int64[np.ndarray, " trigrams"]
    amounts: Float64[np.ndarray, " trigrams"]  # above 0

    @classmethod
    def of(
        cls,
        bigrams: Int64[np.ndarray, " given"],
        successors: Int64[np.ndarray, " given"],
        amounts: Float32[np.ndarray, " given"],
    ) -> "Met":
        """Return the distinct trigrams, each with the total weight that it gains."""
        cells = bigrams << TOKEN_BITS | successors
        order = cells.argsort(kind="stable")
        cells = cells[order]
        is_first = _is_first(cells)
        totals = np.bincount(is_first.cumsum() - 1, amounts[order])
        cells = cells[is_first]
        bigrams = cells >> TOKEN_BITS
        is_first = _is_first(bigrams)
        row, starts = is_first.cumsum() - 1, is_first.nonzero()[0]
        column = np.arange(len(row)) - starts[row]
        return cls(bigrams[starts], row, column, cells & (MAX_VOCABULARY - 1), totals)


def grown(before: Successors, met: Met, max_weight: float) -> Successors:
    """Return the successors of bigrams after trigrams have occurred and gained weight.

    If a bigram has too many successors, those that occurred now are preferred to earlier ones.
    """
    count = before.ids.shape[1]
    known = np.minimum(before.weights, np.float32(max_weight))
    is_same = before.ids[met.row] == met.successors[:, None]
    again, at = np.divmod(is_same.ravel().nonzero()[0], count)  # faster than `nonzero` on two axes
    was_known = met.row[again], at
    weights = met.amounts.copy()
    weights[again] += known[was_known]
    weights = np.minimum(weights, max_weight).astype(np.float32)
    row, column, met_keys = met.row, met.column, _keys(weights, met.successors)
    if column.max() >= count:  # a bigram may have thousands of successors
        row, column, met_keys = _first_of_each(row, met_keys, count)
    keys = np.full((len(before.ids), count + int(column.max()) + 1), _MISSING)
    keys[:, :count] = _keys(known, before.ids) | _KNOWN
    keys[was_known] = _MISSING
    keys[row, count + column] = met_keys
    keys.sort(axis=1)
    return _rows(keys[:, :count])


def _first_of_each(
    row: Int64[np.ndarray, " n"], keys: Int64[np.ndarray, " n"], count: int
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Return the row, column and key of the `count` smallest keys of each row."""
    order = np.lexsort((keys, row))
    row, keys = row[order], keys[order]
    column = np.arange(len(row)) - np.searchsorted(row, row)
    stays = column < count
    return row[stays], column[stays], keys[stays]


def _keys(
    weights: Float32[np.ndarray, "*shape"],
    tokens: Int32[np.ndarray, "*shape"] | Int64[np.ndarray, "*shape"],
) -> Int64[np.ndarray, "*shape"]:
    # The bits of non-negative floats have the same order as the floats.
    lightness = _LIGHTEST - weights.view(np.int32)
    return lightness.astype(np.int64) << TOKEN_BITS | tokens & (MAX_VOCABULARY - 1)


def _rows(keys: Int64[np.ndarray, "rows successors"]) -> Successors:
    weights = (_LIGHTEST - (keys >> TOKEN_BITS & _LIGHTEST)).astype(np.int32).view(np.float32)
    ids = (keys & (MAX_VOCABULARY - 1)).astype(np.int32)
    ids[weights == 0] = NO_SUCCESSOR
    return Successors(ids, weights)


def _is_first(values: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Return a mask of the first occurrence of each value; values must be in ascending order."""
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first


class TrigramTable:
    """An adaptive table `M[(a, b)] -> {c: weight}` on top of an immutable index; thread-safe.

    When a bigram is first learned, its successors are copied from the index. From then on, the
    bigram is looked up in this table; after its eviction, it is looked up in the index again.
    Memory is allocated once: 16 bytes for each bigram and 8 bytes for each of its successors.

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
        self.num_successors = num_successors
        self.max_weight = max_weight
        self.below = None if below is None else below.narrowed(num_successors)
        self._slots = BigramSlots(max_bigrams)
        # A page of zeros takes no memory until something is written to it.
        self._ids = np.zeros((self._slots.size, num_successors), np.int32)
        self._weights = np.zeros((self._slots.size, num_successors), np.float32)
        self._lock = Lock()

    def row(self, first: int, second: int) -> tuple[list[int], list[float]]:
        with self._lock:
            slot = self._slots.find_one((first << TOKEN_BITS) | second)
            if slot is not None:
                return successors_at(Successors(self._ids, self._weights), slot)
        if self.below is None:
            return [], []
        return self.below.row(first, second)

    def add(
        self,
        bigrams: Int64[np.ndarray, " trigrams"],
        successors: Int64[np.ndarray, " trigrams"],
        amounts: Float32[np.ndarray, " trigrams"],
    ) -> None:
        """Add weight to trigrams, once for each occurrence; unknown trigrams are created.

        If a bigram gets too many successors, the given ones are kept first, then the heaviest
        earlier ones. Of successors with the same weight, those with the smallest tokens are kept.

        Args:
            amounts: weight that each occurrence adds; amounts that are not positive are ignored.
        """
        is_given = amounts > 0
        if is_given.any():
            self._learn(Met.of(bigrams[is_given], successors[is_given], amounts[is_given]))

    def clear(self) -> None:
        """Discard everything except the underlying index."""
        with self._lock:
            self._slots.clear()

    def _learn(self, met: Met) -> None:
        with self._lock:
            found = self._slots.find(met.bigrams)
            before = self._rows_at(found, met.bigrams)
            slots = self._slots.claim(met.bigrams, found)
            ids, weights = grown(before, met, self.max_weight)
            has_slot = slots >= 0
            if not has_slot.all():
                slots, ids, weights = slots[has_slot], ids[has_slot], weights[has_slot]
            self._ids[slots] = ids
            self._weights[slots] = weights

    def _rows_at(
        self, slots: Int64[np.ndarray, " n"], bigrams: Int64[np.ndarray, " n"]
    ) -> Successors:
        """Return the successors of bigrams, given their slots; -1 stands for no slot."""
        ids, weights = self._ids[slots], self._weights[slots]
        is_missing = slots < 0
        if is_missing.any():
            if self.below is None:
                ids[is_missing], weights[is_missing] = NO_SUCCESSOR, 0.0
            else:
                ids[is_missing], weights[is_missing] = self._padded(bigrams[is_missing])
        return Successors(ids, weights)

    def _padded(self, bigrams: Int64[np.ndarray, " n"]) -> Successors:
        """Return successors from the underlying index, padded to the width of this table."""
        assert self.below is not None
        found = self.below.lookup(bigrams)
        padded = Successors.none(len(bigrams), self.num_successors)
        width = found.ids.shape[1]
        padded.ids[:, :width], padded.weights[:, :width] = found
        padded.ids[padded.weights == 0] = NO_SUCCESSOR  # files may contain any id here
        return padded
