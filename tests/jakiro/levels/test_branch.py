"""Heads of parallel levels equal their equations, and read the pairs of their own branch."""

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tables import frontier_of
from helpers.variants import BRANCH, FEEDBACK
from pydantic import ValidationError
from torch.nn.functional import rms_norm

from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.experts import ExpertsOutput
from jakiro.levels.branch import LevelHeads
from jakiro.target.adapter import TargetAdapter
from moa.trunk import TrunkInputs

GUMIHO = tiny_settings(1, parallel_levels=2, trunk=FEEDBACK, **BRANCH)


@torch.no_grad()
def test_levels_equal_their_equations() -> None:
    torch.manual_seed(0)
    heads = LevelHeads(6, 5, 3, norm_eps=1e-3)
    embeddings, previous, before = torch.randn(3, 1, 4, 6)
    features = torch.randn(1, 4, 1, 2, 6)
    log_weights = torch.randn(1, 4, 2).log_softmax(-1)
    output = ExpertsOutput(features, log_weights, log_weights.exp())
    got = heads(output, embeddings, TrunkInputs(previous, earlier=before.unsqueeze(2)))
    own = (log_weights.exp().unsqueeze(-1) * features[:, :, 0]).sum(2)
    parts = [rms_norm(part, (6,), eps=1e-3) for part in (before, previous, embeddings, own)]
    assert got.features.shape == (1, 4, 1 + 3, 2, 6)
    assert torch.equal(got.features[:, :, :1], features)
    for level in range(3):
        rows = heads.joins[level].weight.split(6, dim=1)
        joined = own + sum(part @ row.T for part, row in zip(parts, rows, strict=True))
        expected = heads.networks[level](joined)
        for component in range(2):
            found = got.features[:, :, 1 + level, component]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_branch_neither_sees_its_siblings_nor_reads_the_pairs_of_another_parent() -> None:
    target = TargetAdapter(tiny_llama())
    shape = TreeShape(autoregressive_levels=3, parallel_levels=2)
    drafter = TrainedDrafter(tiny_drafter(target, GUMIHO), target, shape)
    session, _ = prefilled(drafter, torch.randint(0, 61, (1, 9)), 8)
    # The second frontier is in another order than its parents, and two nodes share a parent.
    tokens, origins = ([7, 19], [5, 23, 42]), ([0, 0], [1, 0, 1])
    tree = session.start_tree()
    tree.joint(1, None)
    for depth, (ids, origin) in enumerate(zip(tokens, origins, strict=True), start=2):
        tree.joint(depth, frontier_of(torch.tensor([ids]), torch.tensor([origin])))
    for index, (last, parent) in enumerate(zip(tokens[1], origins[1], strict=True)):
        path = session.start_tree()
        path.joint(1, None)
        path.joint(2, chain_frontier(tokens[0][parent]))
        path.joint(3, chain_frontier(last))
        alone = path.level_log_probs[:, 0]
        torch.testing.assert_close(tree.level_log_probs[:, index], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"trunk": {}}, {"trunk": FEEDBACK, "output_norm": "feedback"}])
def test_heads_that_could_not_read_features_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="parallel_heads=branch requires"):
        tiny_settings(**changes, **BRANCH)
