"""Where bigrams lie in a bounded table: sets of a few places each, as lines in a processor's cache.

A bigram's hash names its set; where that is full, what was learnt from the longest ago makes way.
"""

from typing import Final

import numpy as np
from jaxtyping import Int64

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
        turn = np.arange(len(sets)) - np.searchsorted(sets, sets)  # among those of one set
        has_room = turn < self._ways
        sets, bigrams, turn = sets[has_room], bigrams[has_room], turn[has_room]
        age = np.where(self._keys[sets] == 0, -1, self._learnt_at[sets])
        way = np.argsort(age, axis=1, kind="stable")[np.arange(len(sets)), turn]
        self._keys[sets, way] = bigrams + 1
        self._learnt_at[sets, way] = self._clock

    def _sets(self, bigrams: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        mixed = bigrams.view(np.uint64) * np.uint64(_GOLDEN) >> np.uint64(32)
        return (mixed % np.uint64(len(self._keys))).view(np.int64)
