"""The lookup drafter: its longest matches, their continuations, and the resulting tree."""

import numpy as np
from helpers.candidates import assert_well_formed
from hypothesis import given
from hypothesis import strategies as st

from inference.drafters.lookup import (
    LookupDrafter,
    LookupSettings,
    continuations,
    find_matches,
    merged,
)


def _ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=30), longest=st.integers(1, 6))
def test_all_matches_are_found_with_their_lengths(text: list[int], longest: int) -> None:
    found = find_matches(_ids(*text), longest)
    expected = {}
    for end in range(len(text) - 1):
        length = 0
        while length < min(longest, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        if length:
            expected[end] = length
    assert dict(zip(found.ends.tolist(), found.lengths.tolist(), strict=True)) == expected


def test_the_longest_matches_come_first_and_of_these_the_latest() -> None:
    text = _ids(7, 1, 2, 9, 1, 2, 8, 3, 2, 6, 1, 2)
    best = find_matches(text, 4).best(shortest=1, count=3)
    assert best.ends.tolist() == [5, 2, 8]
    assert best.lengths.tolist() == [2, 2, 1]
    assert find_matches(text, 4).best(shortest=2, count=9).ends.tolist() == [5, 2]


def test_continuations_go_on_with_the_period_of_their_match() -> None:
    text = _ids(1, 2, 3, 1, 2, 3)
    assert continuations(text, _ids(2), 5).tolist() == [[1, 2, 3, 1, 2]]


def test_equal_beginnings_become_one_path() -> None:
    tree = merged([[1, 2], [1, 3], [4, 2]], [1.0, 1.0, 2.0], discount=0.5)
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 2]
    assert tree.parents.tolist() == [-1, 0, 0, -1, 3]
    assert tree.depths.tolist() == [1, 2, 2, 1, 2]
    assert tree.scores.tolist() == [0.5, 0.125, 0.125, 0.5, 0.25]


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=50),
    num_nodes=st.integers(1, 20),
    depth=st.integers(1, 9),
)
def test_trees_hold_different_siblings_below_likelier_parents(
    text: list[int], num_nodes: int, depth: int
) -> None:
    found = LookupDrafter(LookupSettings()).draft(_ids(*text), num_nodes, depth)
    assert_well_formed(found, num_nodes, depth)


def test_scores_stay_positive_whatever_underflows() -> None:
    text = _ids(*[0, 1] * 1000, 2, *[0, 1] * 1000)
    found = LookupDrafter(LookupSettings(longest=2000)).draft(text, 60, 12)
    assert len(found.token_ids) > 12
    assert_well_formed(found, 60, 12)
    assert np.isfinite(np.log(found.scores)).all()


def test_the_strength_is_the_length_of_the_longest_match() -> None:
    drafter = LookupDrafter(LookupSettings(longest=3))
    texts = {0: (1, 2, 3), 1: (1, 2, 3, 1), 2: (1, 2, 3, 1, 2), 3: (1, 2, 3, 4, 1, 2, 3, 4)}
    assert {drafter.draft(_ids(*text), 8, 4).strength for text in texts.values()} == set(texts)
