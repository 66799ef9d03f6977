"""Slots are kept by the bigrams that were learned last."""

import numpy as np

from inference.drafters.aded.slots import WAYS, BigramSlots


def _claim(slots: BigramSlots, *bigrams: int) -> list[int]:
    """Learn bigrams, and return their slots."""
    asked = np.array(bigrams, np.int64)
    return slots.claim(asked, slots.find(asked)).tolist()


def _found(slots: BigramSlots, *bigrams: int) -> list[int]:
    return slots.find(np.array(bigrams, np.int64)).tolist()


def test_a_bigram_keeps_its_slot() -> None:
    slots = BigramSlots(64)
    given = _claim(slots, 3, 5, 2**40)
    assert len(set(given)) == 3
    assert _claim(slots, 5, 7)[0] == given[1]
    assert _found(slots, 3, 5, 2**40) == given
    assert [slots.find_one(bigram) for bigram in (3, 5, 2**40)] == given
    assert _found(slots, 4) == [-1]
    assert slots.find_one(4) is None


def test_in_a_full_set_the_bigram_that_was_learned_first_is_evicted() -> None:
    slots = BigramSlots(WAYS)  # a single set
    for bigram in range(WAYS):
        _claim(slots, bigram)
    _claim(slots, 0)  # now, bigram 1 was learned the longest time ago
    freed = slots.find_one(1)
    assert _claim(slots, 100) == [freed]
    assert _found(slots, 1) == [-1]


def test_more_new_bigrams_than_slots_leave_some_without_a_slot() -> None:
    slots = BigramSlots(WAYS)
    given = _claim(slots, *range(WAYS + 2))
    assert given.count(-1) == 2
    assert sorted(slot for slot in given if slot >= 0) == list(range(WAYS))
