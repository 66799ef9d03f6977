"""Statistics of two drafters: rates converge, fade, and divide sampled trees."""

import numpy as np
import pytest

from inference.draft_tree import ROOT, SequenceTree
from inference.drafters.candidates import Candidates
from inference.drafters.combined.knowledge import (
    Calibration,
    CandidatePool,
    Knowledge,
    SampledNodes,
    sampled_budget,
    shape_cells,
    tree_cells,
)
from inference.protocol import Budget
from inference.trees.shape import TreeShape


def _candidate(source: int, depth: int, score: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array([source]), np.array([depth]), np.array([score])


def test_rates_converge_to_those_of_a_source_whatever_its_scores() -> None:
    calibration = Calibration()
    random = np.random.default_rng(0)
    truth = {(0, 1, 0.9): 0.2, (0, 3, 0.9): 0.6, (1, 1, 0.04): 0.8}
    for _ in range(3000):
        for candidate, rate in truth.items():
            calibration.add(*_candidate(*candidate), random.random(1) < rate)
    for candidate, rate in truth.items():
        assert calibration.rates(*_candidate(*candidate))[0] == pytest.approx(rate, abs=0.08)
    untouched = calibration.rates(*_candidate(1, 2, 0.6))[0]
    assert untouched == pytest.approx(0.3)  # its own score, times the trust of 0.5


def test_node_rates_are_learned_from_sampled_trees_of_any_size() -> None:
    shape = TreeShape(
        autoregressive_levels=2, parallel_levels=0, children=2, breadth=1, sampled=True
    )
    children = {ROOT: [0, 1], 1: [2, 3]}
    tree = SequenceTree(
        [5, 6, 7, 8], [-1, -1, 1, 1], [1, 1, 2, 2], [0, 1, 0, 1], [0] * 4, children, {}, {}
    )
    for cells in (tree_cells(tree), shape_cells(shape)):
        assert np.stack(cells).T.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    sampled = SampledNodes(shape)
    for _ in range(400):
        sampled.learn(tree, [1, 2])
    assert sampled.worth(shape) == pytest.approx(2.0, abs=0.1)
    chain = shape.model_copy(update={"children": 1})
    assert sampled.worth(chain) == pytest.approx(1.0, abs=0.1)
    assert SampledNodes(shape).worth(chain) == 1.0


def test_fewer_nodes_are_sampled_only_where_guesses_win_more() -> None:
    shape = TreeShape(
        autoregressive_levels=2, parallel_levels=0, children=2, breadth=2, sampled=True
    )
    sampled = SampledNodes(shape)
    tree = SequenceTree(
        [1] * 6, [-1, -1, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2], [0, 1] * 3, [0] * 6, {}, {}, {}
    )
    budget = Budget(6, 2)
    assert sampled_budget(sampled, shape, budget, [[0.1] * 6]) == 6
    for _ in range(300):
        sampled.learn(tree, [0])  # no other node is ever accepted
    assert sampled_budget(sampled, shape, budget, [[0.0] * 6]) in (2, 4, 6)
    assert sampled_budget(sampled, shape, budget, [[0.6, 0.5, 0.4, 0.3, 0.2, 0.1]]) == 2
    assert sampled_budget(sampled, shape, budget, [[0.001] * 6]) == 6
    assert sampled_budget(sampled, shape, Budget(0, 2), [[]]) == 0


def test_guesses_that_are_never_right_gain_nothing() -> None:
    knowledge = Knowledge(TreeShape(sampled=True))
    guess = Candidates(np.array([5]), np.array([-1]), np.array([1]), np.array([0.9]))
    assert knowledge.gains(guess)[0] > 0.1
    children = {ROOT: [0]}
    tree = SequenceTree([4], [-1], [1], [0], [0], children, {}, children)
    for _ in range(200):
        pool = CandidatePool(tree, [-0.1])
        pool.graft(ROOT, guess, depth=1)
        knowledge.learn(pool, [4, 3])
    assert knowledge.gains(guess)[0] < 0.05
    assert knowledge.gains(Candidates.none()) == []
