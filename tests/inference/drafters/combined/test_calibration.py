"""What is learnt of two sources: rates that converge, fade and are forgotten; how much is drawn."""

import numpy as np
import pytest

from inference.draft_tree import ROOT, TreeRow
from inference.drafters.candidates import Candidates
from inference.drafters.combined.knowledge import (
    CombinedSettings,
    Knowledge,
    SampledNodes,
    places_in,
    places_of,
    sampled_budget,
)
from inference.drafters.combined.pool import Calibration, Pool
from inference.protocol import Budget
from inference.trees.shape import TreeShape

EMPTY = TreeRow([], [], [], [], [], {}, {}, {})


def _candidate(source: int, depth: int, score: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array([source]), np.array([depth]), np.array([score])


def test_rates_converge_to_those_of_a_source_whatever_it_says_itself() -> None:
    calibration = Calibration((1.0, 0.5), doubt=8.0, memory=400.0)
    random = np.random.default_rng(0)
    truth = {(0, 1, 0.9): 0.2, (0, 3, 0.9): 0.6, (1, 1, 0.04): 0.8}
    for _ in range(3000):
        for candidate, rate in truth.items():
            calibration.add(*_candidate(*candidate), random.random(1) < rate)
    for candidate, rate in truth.items():
        assert calibration.rates(*_candidate(*candidate))[0] == pytest.approx(rate, abs=0.08)
    untouched = calibration.rates(*_candidate(1, 2, 0.6))[0]
    assert untouched == pytest.approx(0.3)  # its own score, half trusted


def test_what_was_learnt_fades_is_bounded_and_can_be_forgotten() -> None:
    calibration = Calibration((1.0,), doubt=4.0, memory=50.0)
    size = calibration.num_bytes
    one = _candidate(0, 1, 0.5)
    for is_right in (True, False):
        for _ in range(300):
            calibration.add(*one, np.array([is_right]))
    assert calibration.rates(*one)[0] < 0.1
    assert calibration.num_bytes == size
    calibration.clear()
    assert calibration.rates(*one)[0] == 0.5


def test_places_are_learnt_from_drawn_trees_of_any_size() -> None:
    shape = TreeShape(
        autoregressive_levels=2, parallel_levels=0, children=2, breadth=1, sampled=True
    )
    children = {ROOT: [0, 1], 1: [2, 3]}
    row = TreeRow(
        [5, 6, 7, 8], [-1, -1, 1, 1], [1, 1, 2, 2], [0, 1, 0, 1], [0] * 4, children, {}, {}
    )
    assert places_of(row) == places_in(shape) == [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1)]
    places = SampledNodes()
    for _ in range(400):
        places.learn(row, [1, 2])
    assert places.worth(shape) == pytest.approx(2.0, abs=0.1)
    chain = shape.model_copy(update={"children": 1})
    assert places.worth(chain) == pytest.approx(1.0, abs=0.1)
    places.clear()
    assert places.worth(chain) == 1.0


def test_less_is_drawn_only_where_guesses_win_more() -> None:
    shape = TreeShape(
        autoregressive_levels=2, parallel_levels=0, children=2, breadth=2, sampled=True
    )
    places = SampledNodes()
    row = TreeRow(
        [1] * 6, [-1, -1, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2], [0, 1] * 3, [0] * 6, {}, {}, {}
    )
    budget = Budget(6, 2)
    assert sampled_budget(places, shape, budget, [[0.1] * 6]) == 6
    for _ in range(300):
        places.learn(row, [0])  # nothing but the first place ever wins
    assert sampled_budget(places, shape, budget, [[0.0] * 6]) in (2, 4, 6)
    assert sampled_budget(places, shape, budget, [[0.6, 0.5, 0.4, 0.3, 0.2, 0.1]]) == 2
    assert sampled_budget(places, shape, budget, [[0.001] * 6]) == 6
    assert sampled_budget(places, shape, Budget(0, 2), [[]]) == 0


def test_candidates_of_two_sources_become_one_tree_without_equal_siblings() -> None:
    children = {ROOT: [0, 1], 0: [2]}
    row = TreeRow([5, 6, 7], [-1, -1, 0], [1, 1, 2], [0, 1, 2], [0] * 3, {}, children, children)
    pool = Pool(row, [-0.5, -1.0, -1.5])
    guess = Candidates(
        np.array([5, 9, 7, 4]), np.array([-1, 0, 0, 2]), np.array([1, 2, 2, 3]), np.full(4, 0.5)
    )
    assert pool.graft(ROOT, guess, depth=3) == [0, 3, 2, 4]
    assert pool.graft(1, guess, depth=2) == [5, ROOT, ROOT, ROOT]
    assert len(set(zip(pool.parents, pool.token_ids, strict=True))) == len(pool.token_ids)
    assert pool.path(4) == [5, 7, 4]
    values = pool.values(Calibration((1.0, 0.5, 1.0), 8.0, 100.0))
    assert all(p == ROOT or values[n] <= values[p] for n, p in enumerate(pool.parents))
    kept = pool.best(values, 3, np.ones(len(values), np.bool_)).tolist()
    assert all(pool.parents[node] in (ROOT, *kept) for node in kept)


def test_only_candidates_whose_parents_proved_right_are_learnt_from() -> None:
    pool = Pool(EMPTY, [])
    guess = Candidates(
        np.array([1, 2, 3, 4]), np.array([-1, -1, 0, 1]), np.array([1, 1, 2, 2]), np.full(4, 0.5)
    )
    pool.graft(ROOT, guess, depth=2)
    assert list(pool.outcomes([1, 9])) == [(0, True), (1, False), (2, False)]
    assert list(pool.outcomes([7])) == [(0, False), (1, False)]


def test_guesses_gain_nothing_where_the_drawn_candidate_is_the_same() -> None:
    knowledge = Knowledge(CombinedSettings())
    drawn = {ROOT: [0]}
    row = TreeRow([5], [-1], [1], [0], [0], drawn, {}, drawn)
    guess = Candidates(np.array([5]), np.array([-1]), np.array([1]), np.array([0.9]))
    for _ in range(200):
        pool = Pool(row, [-0.1])
        pool.graft(ROOT, guess, depth=1)
        knowledge.learn_sampled(row, pool, guess, [0], [5, 3])
    assert knowledge.gains(guess)[0] < 0.03
    assert knowledge.gains(Candidates.none()) == []
    knowledge.clear()
    assert knowledge.gains(guess)[0] > 0.1
