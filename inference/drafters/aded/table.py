"""Where bigrams lie in a bounded table: sets of a few places each, as lines in a processor's cache.

A bigram's hash names its set; where that is full, what was learnt from the longest ago makes way.
"""

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

WAYS: Final = 8  # places of a set
_GOLDEN: Final = 0x9E3779B97F4A7C15  # spreads neighbouring bigrams over all sets
_64_BITS: Final = (1 << 64) - 1


class BigramPlaces:
    """Gives bigrams places, of which there are as many as ever; threads take turns.

    Args:
        max_bigrams: the most that have a place.
    """

    def __init__(self, max_bigrams: int) -> None:
        self._ways = min(WAYS, max_bigrams)
        num_sets = max_bigrams // self._ways
        self._keys = np.zeros((num_sets, self._ways), np.int64)  # bigram + 1; 0: free
        self._learnt_at = np.zeros((num_sets, self._ways), np.int64)
        self._clock = 0

    @property
    def size(self) -> int:
        """Number of places."""
        return self._keys.size

    @property
    def num_taken(self) -> int:
        """Bigrams that have a place."""
        return int(np.count_nonzero(self._keys))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, however many bigrams there are."""
        return self._keys.nbytes + self._learnt_at.nbytes

    def taken(self) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return all bigrams that have a place, and when each was last learnt from."""
        is_taken = self._keys > 0
        return self._keys[is_taken] - 1, self._learnt_at[is_taken]

    def find_one(self, bigram: int) -> int | None:
        """Return the place of one bigram, if it has one; quicker than `find`."""
        here = ((bigram * _GOLDEN & _64_BITS) >> 32) % len(self._keys)
        keys = self._keys[here].tolist()
        return here * self._ways + keys.index(bigram + 1) if bigram + 1 in keys else None

    def find(self, bigrams: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the places of bigrams, or -1."""
        sets, stored = self._sets(bigrams), bigrams + 1
        way = (self._keys[sets] == stored[:, None]).argmax(axis=1)
        places = sets * self._ways + way
        return np.where(self._keys.ravel()[places] == stored, places, -1)

    def claim(
        self, bigrams: Int64[np.ndarray, " n"], found: Int64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        """Return the places of different bigrams that are learnt from; new ones get some.

        It is -1 where there is no room, because too many of these share a set.

        Args:
            bigrams: that are learnt from.
            found: what `find` says of them.
        """
        self._clock += 1
        is_new = found < 0
        if not is_new.any():
            self._learnt_at.ravel()[found] = self._clock
            return found
        self._learnt_at.ravel()[found[~is_new]] = self._clock
        self._insert(bigrams[is_new])
        return self.find(bigrams)

    def clear(self) -> None:
        """Free all places."""
        self._keys.fill(0)

    def _insert(self, bigrams: Int64[np.ndarray, " n"]) -> None:
        """Give new bigrams the places that are free or were learnt from the longest ago."""
        sets = self._sets(bigrams)
        order = np.argsort(sets, kind="stable")
        sets, bigrams = sets[order], bigrams[order]
        order = np.arange(len(sets)) - np.searchsorted(sets, sets)  # among those of one set
        has_room = order < self._ways
        sets, bigrams, order = sets[has_room], bigrams[has_room], order[has_room]
        age = np.where(self._keys[sets] == 0, -1, self._learnt_at[sets])
        way = np.argsort(age, axis=1, kind="stable")[np.arange(len(sets)), order]
        self._keys[sets, way] = bigrams + 1
        self._learnt_at[sets, way] = self._clock

    def _sets(self, bigrams: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        mixed = bigrams.view(np.uint64) * np.uint64(_GOLDEN) >> np.uint64(32)
        return (mixed % np.uint64(len(self._keys))).view(np.int64)


# From the top: whether it was known only, how light it is (31 bits), its token.
_KNOWN: Final = 1 << (31 + TOKEN_BITS)
_LIGHTEST: Final = (1 << 31) - 1  # larger than the bits of any float32 above 0
_MISSING: Final = _KNOWN | _LIGHTEST << TOKEN_BITS  # a weight of 0, after all others


class Met(NamedTuple):
    """Different trigrams, and how much heavier each shall be."""

    bigrams: Int64[np.ndarray, " rows"]  # different ones, ascending
    row: Int64[np.ndarray, " trigrams"]  # which bigram is a trigram's own
    column: Int64[np.ndarray, " trigrams"]  # its place among those of one bigram
    successors: Int64[np.ndarray, " trigrams"]
    amounts: Float64[np.ndarray, " trigrams"]  # above 0

    @classmethod
    def of(
        cls,
        bigrams: Int64[np.ndarray, " given"],
        successors: Int64[np.ndarray, " given"],
        amounts: Float32[np.ndarray, " given"],
    ) -> "Met":
        """Return trigrams, of which there is one at least, with what each is given in all."""
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

    @classmethod
    def of_rows(
        cls,
        bigrams: Int64[np.ndarray, " rows"],
        successors: Int64[np.ndarray, "rows each"],
        amounts: Float32[np.ndarray, "rows each"],
    ) -> "Met":
        """Return the same where neither bigrams nor any one's successors repeat themselves."""
        order = bigrams.argsort()
        row, column = np.divmod(np.arange(amounts.size), amounts.shape[1])
        totals = amounts[order].ravel().astype(np.float64)
        return cls(bigrams[order], row, column, successors[order].ravel(), totals)


def grown(before: Successors, met: Met, max_weight: float, decay: float) -> Successors:
    """Return rows in which what was met is heavier; of too many, those met now stay first.

    Args:
        before: the rows of the bigrams that were met.
        met: the trigrams.
        max_weight: at which a weight stops growing.
        decay: what is left of what was known.
    """
    count = before.ids.shape[1]
    known = np.minimum(before.weights * np.float32(decay), np.float32(max_weight))
    is_same = before.ids[met.row] == met.successors[:, None]
    again, at = np.divmod(is_same.ravel().nonzero()[0], count)  # much quicker than in two axes
    was_known = met.row[again], at
    weights = met.amounts.copy()
    weights[again] += known[was_known]
    weights = np.minimum(weights, max_weight).astype(np.float32)
    row, column, met_keys = met.row, met.column, _keys(weights, met.successors)
    if column.max() >= count:  # one bigram of a list may have thousands
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
    """Return row, place and key of the smallest keys of each row, at most `count` of each."""
    order = np.lexsort((keys, row))
    row, keys = row[order], keys[order]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    stays = place < count
    return row[stays], place[stays], keys[stays]


def _keys(
    weights: Float32[np.ndarray, "*shape"],
    tokens: Int32[np.ndarray, "*shape"] | Int64[np.ndarray, "*shape"],
) -> Int64[np.ndarray, "*shape"]:
    # The bits of floats are in the order of the floats, as there are none below 0.
    lightness = _LIGHTEST - weights.view(np.int32)
    return lightness.astype(np.int64) << TOKEN_BITS | tokens & (MAX_VOCABULARY - 1)


def _rows(keys: Int64[np.ndarray, "rows successors"]) -> Successors:
    weights = (_LIGHTEST - (keys >> TOKEN_BITS & _LIGHTEST)).astype(np.int32).view(np.float32)
    ids = (keys & (MAX_VOCABULARY - 1)).astype(np.int32)
    ids[weights == 0] = NO_SUCCESSOR
    return Successors(ids, weights)


def _is_first(values: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Return where ascending values differ from the one before."""
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first


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
