"""Random target and draft probabilities, with children of nodes to check against them."""

import torch
from helpers.random_trees import RandomTrees, joined

from inference.draft_tree import ROOT
from inference.engine.siblings import ChildTable, Siblings
from inference.engine.support import RecordedDistribution, Support


def random_support(
    batch: int, sampled_share: float, drafted: int = 5, is_recorded: bool = True
) -> tuple[Support, Siblings]:
    """Return the probabilities after the roots of random trees, and the children of the roots."""
    source = RandomTrees(drafted=drafted, sampled_share=sampled_share)
    tree = joined([source.tree(seed) for seed in range(batch)])
    probs = torch.stack([source.target_probs(seed)[0] for seed in range(batch)])
    siblings = ChildTable(tree, source.vocab).under(torch.full((batch,), ROOT))
    assert tree.draft_probs is not None
    ids, draft_probs = tree.draft_probs.ids[:, 0], tree.draft_probs.probs[:, 0]
    recorded = RecordedDistribution(ids, draft_probs) if is_recorded else None
    return Support.of(probs, siblings.token, recorded), siblings
