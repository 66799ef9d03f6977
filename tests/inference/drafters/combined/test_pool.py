"""The pool of two drafters' candidates: their sources, probabilities and outcomes."""

import numpy as np
import pytest

from inference.draft_tree import ROOT, SequenceTree
from inference.drafters.candidates import Candidates
from inference.drafters.combined.knowledge import (
    BOTH,
    FIRST,
    SECOND,
    Calibration,
    CandidatePool,
)

# The tree is the chain of tokens 1, 2; the guess of the second source is the chain 1, 3, 4.
TREE = SequenceTree(
    token_ids=[1, 2],
    parent=[ROOT, 0],
    depth=[1, 2],
    rank=[0, 0],
    proposer_id=[0, 0],
    children={ROOT: [0], 0: [1]},
    sampled={},
    deterministic={ROOT: [0], 0: [1]},
)
GUESS = Candidates(
    np.array([1, 3, 4]), np.array([ROOT, 0, 1]), np.array([1, 2, 3]), np.array([0.5, 0.25, 0.2])
)


def pool_of_two(depth: int = 3) -> CandidatePool:
    """Return the pool of `TREE` and the nodes of `GUESS` down to a depth."""
    pool = CandidatePool(TREE, [np.log(0.8), np.log(0.4)])
    pool.graft(ROOT, GUESS, depth)
    return pool


def test_candidates_keep_their_source_and_their_conditional_probability() -> None:
    pool = pool_of_two()
    assert pool.token_ids == [1, 2, 3, 4]
    assert pool.parents == [ROOT, 0, 0, 2]
    assert pool.sources == [BOTH, FIRST, SECOND, SECOND]
    assert pool.scores == pytest.approx([0.8, 0.5, 0.5, 0.8])
    assert pool.path(3) == [1, 3, 4]
    assert pool_of_two(depth=2).token_ids == [1, 2, 3]


def test_a_path_is_worth_the_product_of_its_candidates() -> None:
    pool = pool_of_two()
    values = pool.values(Calibration())
    trusted = 0.5  # a guess that only the second drafter proposes counts half
    assert values == pytest.approx([0.8, 0.4, 0.4 * trusted, 0.32 * trusted**2])
    best = pool.best(values, 2, np.ones(4, np.bool_))
    assert best.tolist() == [0, 1]


def test_only_candidates_whose_parents_were_right_have_an_outcome() -> None:
    pool = pool_of_two()
    assert dict(pool.outcomes([1, 3, 9])) == {0: True, 1: False, 2: True, 3: False}
    assert dict(pool.outcomes([7, 3])) == {0: False}
