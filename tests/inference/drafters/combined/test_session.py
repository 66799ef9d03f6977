"""The trees of a session hold the selected candidates of both drafters."""

import numpy as np
import torch
from helpers.pools import pool_of_two

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.drafters.candidates import Candidates
from inference.drafters.combined.pool import CandidatePool
from inference.drafters.combined.session import mixed_tree

VALUES = np.array([0.8, 0.4, 0.5, 0.1])  # of the four candidates of the pool
SECOND_ID = 5


def _first(batch: int = 1, draft_probs: SparseDistribution | None = None) -> DraftTree:
    """Return the first drafter's own trees, with the candidates that it has in the pool."""
    kind = CandidateKind.DETERMINISTIC if draft_probs is None else CandidateKind.SAMPLED
    return DraftTree(
        token_ids=torch.tensor([[1, 2]] * batch),
        parent=torch.tensor([[ROOT, 0]] * batch),
        depth=torch.tensor([[1, 2]] * batch),
        score=torch.tensor([[0.8, 0.4]] * batch).log(),
        kind=torch.full((batch, 2), int(kind)),
        rank=torch.zeros(batch, 2, dtype=torch.long),
        proposer_id=torch.zeros(batch, 2, dtype=torch.long),
        is_valid=torch.ones(batch, 2, dtype=torch.bool),
        base_length=torch.arange(9, 9 + batch),
        max_depth=2,
        max_siblings=1,
        step_id=4,
        draft_probs=draft_probs,
    )


def _kept(pool: CandidatePool, *nodes: int, is_sampled: bool = False) -> Candidates:
    return pool.kept(VALUES, np.array(nodes, np.int64), SECOND_ID, is_sampled=is_sampled)


def test_candidates_of_both_drafters_form_one_tree() -> None:
    pool = pool_of_two()
    tree = mixed_tree([_kept(pool, 0, 1, 2, 3)], _first())
    assert tree.token_ids.tolist() == [[1, 2, 3, 4]]
    assert tree.parent.tolist() == [[ROOT, 0, 0, 2]]
    assert tree.depth.tolist() == [[1, 2, 2, 3]]
    assert tree.proposer_id.tolist() == [[0, 0, SECOND_ID, SECOND_ID]]
    assert (tree.max_depth, tree.max_siblings, tree.step_id) == (3, 2, 4)
    assert tree.base_length.tolist() == [9]
    assert tree.draft_probs is None
    torch.testing.assert_close(tree.score.exp(), torch.tensor(VALUES, dtype=torch.float32)[None])
    # The rank follows the score.
    assert tree.rank.tolist() == [[0, 2, 1, 3]]


def test_smaller_trees_of_a_batch_are_padded() -> None:
    pools = [pool_of_two(), pool_of_two()]
    kept = [_kept(pools[0], 0, 1, 2, 3), _kept(pools[1], 0)]
    tree = mixed_tree(kept, _first(batch=2))
    assert tree.is_valid.tolist() == [[True] * 4, [True, False, False, False]]
    assert tree.parent[1].tolist() == [ROOT] * 4
    assert tree.score[1, 1:].tolist() == [-np.inf] * 3
    assert tree.sequence_tree(1).children == {ROOT: [0]}


def test_only_candidates_of_the_first_drafter_are_sampled() -> None:
    pool = pool_of_two()
    probs = SparseDistribution(
        torch.tensor([[[1, 2], [2, 3], [0, 0]]]), torch.tensor([[[0.8, 0.2], [0.5, 0.5], [0, 0]]])
    )
    tree = mixed_tree([_kept(pool, 0, 1, 2, 3, is_sampled=True)], _first(draft_probs=probs))
    sampled, deterministic = int(CandidateKind.SAMPLED), int(CandidateKind.DETERMINISTIC)
    assert tree.kind.tolist() == [[sampled, sampled, deterministic, deterministic]]
    assert tree.draft_probs is not None
    # One distribution each for the root and four nodes; nothing was sampled below grafted nodes.
    assert tree.draft_probs.probs.shape == (1, 5, 2)
    torch.testing.assert_close(tree.draft_probs.probs[:, :3], probs.probs)
    assert not tree.draft_probs.probs[:, 3:].any()
