"""Tests of the target's input for trees."""

import torch
from helpers.models import tiny_llama

from inference.draft_tree import ROOT, DraftTree
from inference.engine.tree_step import tree_step
from jakiro.target.adapter import TargetAdapter


def _tree(base_length: list[int]) -> DraftTree:
    """Return trees of two children of the root, the first of which has a child."""
    batch = len(base_length)
    ints = torch.zeros(batch, 3, dtype=torch.long)
    return DraftTree(
        token_ids=torch.tensor([[5, 6, 9999]]).expand(batch, -1),
        parent=torch.tensor([[ROOT, ROOT, 0]]).expand(batch, -1),
        depth=torch.tensor([[1, 1, 2]]).expand(batch, -1),
        score=ints.float(),
        kind=ints,
        rank=ints,
        proposer_id=ints,
        is_valid=ints == 0,
        base_length=torch.tensor(base_length),
        max_depth=2,
        max_siblings=2,
    )


def test_node_n_is_query_n_plus_one_behind_the_root() -> None:
    spec = TargetAdapter(tiny_llama()).spec
    step = tree_step(_tree([4, 7]), torch.tensor([[1], [2]]), spec, highest=7)
    assert step.token_ids[:, :3].tolist() == [[1, 5, 6], [2, 5, 6]]
    assert step.positions.tolist() == [[4, 5, 5, 6], [7, 8, 8, 9]]
    assert step.slots.tolist() == [[4, 5, 6, 7], [7, 8, 9, 10]]
    assert step.parents is not None
    assert step.parents.tolist() == [[-1, 0, 0, 1]] * 2
    assert (step.highest_slot, step.max_depth) == (10, 3)


def test_tokens_and_positions_are_kept_within_the_targets_limits() -> None:
    spec = TargetAdapter(tiny_llama()).spec
    last = spec.max_position - 1
    step = tree_step(_tree([last]), torch.tensor([[1]]), spec, highest=last)
    assert int(step.token_ids.max()) == spec.vocab_size - 1
    assert int(step.positions.max()) == last
