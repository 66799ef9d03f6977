"""The search: its closed form matches visits one by one, and its trees are well formed."""

from math import log, sqrt

import numpy as np
import pytest
from helpers.candidates import assert_well_formed
from hypothesis import given
from hypothesis import strategies as st

from inference.drafters.aded.drafter import EXPLORATION, EXPLORATION_GROWTH, search, share_visits
from inference.drafters.aded.table import TrigramTable
from inference.drafters.candidates import Candidates


def _visited_one_by_one(weights: list[float], visits: int) -> list[int]:
    """Return the visits of each child if each visit but the first goes to the highest value."""
    counts = [0] * len(weights)
    factor = EXPLORATION + log((visits + EXPLORATION_GROWTH + 1) / EXPLORATION_GROWTH)
    for _ in range(visits - 1):
        values = [
            weight + factor * weight * sqrt(visits) / (1 + count)
            for weight, count in zip(weights, counts, strict=True)
        ]
        counts[values.index(max(values))] += 1
    return counts


@given(
    weights=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=12),
    visits=st.sampled_from([2, 10, 50, 150]),
)
def test_shares_are_what_visits_one_by_one_come_to(weights: list[float], visits: int) -> None:
    shares = share_visits(float(visits), weights)
    assert sum(shares) == pytest.approx(visits - 1)
    counts = _visited_one_by_one(weights, visits)
    for share, count in zip(shares, counts, strict=True):
        assert share == pytest.approx(count, abs=1.5 + 0.05 * visits)


@given(
    stream=st.lists(st.integers(0, 4), min_size=3, max_size=80),
    num_nodes=st.integers(1, 30),
    depth=st.integers(1, 9),
)
def test_trees_hold_different_siblings_below_likelier_parents(
    stream: list[int], num_nodes: int, depth: int
) -> None:
    table = _learnt(stream)
    found = search(table, *stream[-2:], num_nodes, depth)
    assert_well_formed(found, num_nodes, depth)
    for node, parent in enumerate(found.parents.tolist()):
        before = [*stream[-2:], *(int(found.token_ids[each]) for each in _path(found, parent))]
        assert found.token_ids[node] in table.row(*before[-2:])


def test_the_most_visited_candidates_come_first_and_smaller_trees_are_their_beginning() -> None:
    table = _learnt([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2])
    large = search(table, 1, 2, 20, 6)
    assert (np.diff(large.scores) <= 0).all()
    assert large.token_ids[:2].tolist() == [3, 4]
    small = search(table, 1, 2, 3, 6)
    assert small.token_ids.tolist() == large.token_ids[:3].tolist()
    assert large.best(3).parents.tolist() == small.parents.tolist()


def _learnt(stream: list[int]) -> TrigramTable:
    table = TrigramTable(64)
    table.add(np.array(stream, np.int64), 0.04)
    return table


def _path(found: Candidates, node: int) -> list[int]:
    return [] if node < 0 else [*_path(found, int(found.parents[node])), node]
