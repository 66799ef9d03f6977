"""A pool with the candidates of two drafters."""

import numpy as np

from inference.draft_tree import ROOT, SequenceTree
from inference.drafters.candidates import Candidates
from inference.drafters.combined.pool import CandidatePool

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
