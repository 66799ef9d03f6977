"""Slots for bigrams in bounded memory, organized like a set-associative cache.

The hash of a bigram selects a set of slots. If this set is full, a new bigram replaces the least
recently learned bigram of the set.
"""

from typing import Final

import numpy as np
from jaxtyping import Int64

WAYS: Final = 8  # number of slots in a set
_GOLDEN: Final = 0x9E3779B97F4A7C15  # distributes neighboring bigrams over all sets
_64_BITS: Final = (1 << 64) - 1


class BigramSlots:
    """Assigns slots to bigrams, and evicts the least recently learned bigrams; not thread-safe."""

    def __init__(self, max_bigrams: int) -> None:
        self._ways = min(WAYS, max_bigrams)
        num_sets = max_bigrams // self._ways
        self._keys = np.zeros((num_sets, self._ways), np.int64)  # bigram + 1, or 0 if free
        self._learned_at = np.zeros((num_sets, self._ways), np.int64)
        self._clock = 0

    @property
    def size(self) -> int:
        return self._keys.size

    def find_one(self, bigram: int) -> int | None:
        """Return the slot of a bigram, or None; for a single bigram, this is faster than `find`."""
        here = ((bigram * _GOLDEN & _64_BITS) >> 32) % len(self._keys)
        keys = self._keys[here].tolist()
        return here * self._ways + keys.index(bigram + 1) if bigram + 1 in keys else None

    def find(self, bigrams: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the slots of bigrams; -1 for bigrams without a slot."""
        sets, stored = self._sets(bigrams), bigrams + 1
        way = (self._keys[sets] == stored[:, None]).argmax(axis=1)
        slots = sets * self._ways + way
        return np.where(self._keys.ravel()[slots] == stored, slots, -1)

    def claim(
        self, bigrams: Int64[np.ndarray, " n"], found: Int64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        """Assign slots to the bigrams that have no slot, and return the slots of all bigrams.

        If too many of the bigrams share a set, some of them are left without a slot; their slot in
        the result is -1.
        """
        self._clock += 1
        is_new = found < 0
        if not is_new.any():
            self._learned_at.ravel()[found] = self._clock
            return found
        self._learned_at.ravel()[found[~is_new]] = self._clock
        self._insert(bigrams[is_new])
        return self.find(bigrams)

    def clear(self) -> None:
        self._keys.fill(0)

    def _insert(self, bigrams: Int64[np.ndarray, " n"]) -> None:
        """Assign new bigrams to free slots, or to the slots that were updated longest ago."""
        sets = self._sets(bigrams)
        order = np.argsort(sets, kind="stable")
        sets, bigrams = sets[order], bigrams[order]
        order = np.arange(len(sets)) - np.searchsorted(sets, sets)  # index within a set
        has_room = order < self._ways
        sets, bigrams, order = sets[has_room], bigrams[has_room], order[has_room]
        age = np.where(self._keys[sets] == 0, -1, self._learned_at[sets])
        way = np.argsort(age, axis=1, kind="stable")[np.arange(len(sets)), order]
        self._keys[sets, way] = bigrams + 1
        self._learned_at[sets, way] = self._clock

    def _sets(self, bigrams: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        mixed = bigrams.view(np.uint64) * np.uint64(_GOLDEN) >> np.uint64(32)
        return (mixed % np.uint64(len(self._keys))).view(np.int64)
