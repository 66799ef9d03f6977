"""Networks of parallel levels equal their equations, their published forms, and causal passes."""

from typing import Any

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tables import frontier_of
from helpers.variants import BRANCH, FEEDBACK, MASKS, TRANSFER, TRIGRAM, VARIANTS
from pydantic import ValidationError
from torch.nn.functional import rms_norm

from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.drafter_settings import ScheduleSettings
from jakiro.experts import ExpertsOutput
from jakiro.levels import LevelHeads
from jakiro.target.adapter import TargetAdapter
from moa.trunk import TrunkInputs

GUMIHO = tiny_settings(1, parallel_levels=2, trunk=FEEDBACK, **BRANCH)
PARALLEL = tiny_settings(parallel_levels=3, autoregressive_levels=1, trunk=FEEDBACK, **MASKS)
LENGTH, LEVELS, TAIL = 8, 4, 2  # of Hidden Transfer


@torch.no_grad()
def test_levels_of_branches_equal_their_equations() -> None:
    torch.manual_seed(0)
    heads = LevelHeads(6, 5, 3, norm_eps=1e-3)
    embeddings, previous, before = torch.randn(3, 1, 4, 6)
    features = torch.randn(1, 4, 1, 2, 6)
    log_weights = torch.randn(1, 4, 2).log_softmax(-1)
    output = ExpertsOutput(features, log_weights, log_weights.exp())
    got = heads(output, embeddings, TrunkInputs(previous, earlier=before.unsqueeze(2)))
    mean = (log_weights.exp().unsqueeze(-1) * features[:, :, 0]).sum(2)
    parts = [rms_norm(part, (6,), eps=1e-3) for part in (before, previous, embeddings, mean)]
    assert got.features.shape == (1, 4, 1 + 3, 2, 6)
    assert torch.equal(got.features[:, :, :1], features)
    for level in range(3):
        rows = heads.joins[level].weight.split(6, dim=1)
        joined = mean + sum(part @ row.T for part, row in zip(parts, rows, strict=True))
        expected = heads.networks[level](joined)
        for component in range(2):
            level_features = got.features[:, :, 1 + level, component]
            torch.testing.assert_close(level_features, expected, atol=1e-5, rtol=1e-5)


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


@torch.no_grad()
def test_each_level_equals_a_causal_pass_in_which_masks_follow_the_tokens_so_far() -> None:
    drafter = tiny_drafter(TargetAdapter(tiny_llama()), PARALLEL)
    masks, count = drafter.level_masks, 5
    tokens, features = torch.randn(2, 1, count, drafter.config.target_record.hidden_size)
    causal = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
    got = drafter(tokens, torch.arange(count)[None], causal, TrunkInputs(features))
    assert got.features.shape[2] == 4
    for query in range(count):
        both = [
            torch.cat((read[:, : 1 + query], behind[None]), dim=1)
            for read, behind in ((tokens, masks.tokens), (features, masks.features))
        ]
        places = torch.arange(1 + query + 3)
        visible = (places <= places[:, None])[None, None]
        stream = drafter.trunk(both[0], places[None], visible, TrunkInputs(both[1]))
        expected = drafter.experts(stream[:, query:])
        alone = got.features[:, query]
        torch.testing.assert_close(alone, expected.features[:, :, 0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.log_weights[:, query], expected.log_weights[:, 0])


@torch.no_grad()
def test_siblings_of_a_level_share_distributions_but_not_the_weights_of_the_experts() -> None:
    target = TargetAdapter(tiny_llama())
    shape = TreeShape(autoregressive_levels=1, parallel_levels=3)
    drafter = TrainedDrafter(tiny_drafter(target, PARALLEL), target, shape)
    session, _ = prefilled(drafter, torch.randint(0, 61, (1, 9)), 8)
    below = []
    for token in (7, 19):
        tree = session.start_tree()
        tree.joint(1, None)
        below.append((tree.joint(2, chain_frontier(token)), tree.log_weights))
    (first, weights), (second, others) = below
    conditional = first - weights.unsqueeze(-1), second - others.unsqueeze(-1)
    torch.testing.assert_close(*conditional, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(weights, others)


@torch.no_grad()
def test_transferred_levels_equal_those_of_rows_beside_the_verified_tokens() -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    drafter = tiny_drafter(target, VARIANTS["hidden-transfer"])
    weight = drafter.experts.weight
    assert weight.equal(torch.eye(32).expand(LEVELS, -1, -1))
    weight += 0.1 * torch.randn_like(weight)
    tokens = torch.randint(0, 61, (1, LENGTH + 1))
    whole = model(tokens[:, :LENGTH], output_hidden_states=True).hidden_states
    # The published form: real rows and pseudo rows go through the last layers together.
    states = whole[-1 - TAIL]
    rows = torch.cat((states, (weight @ states[0, -1])[None]), dim=1)
    places = torch.arange(LENGTH + LEVELS)
    mask = torch.full((1, 1, len(places), len(places)), float("-inf")).triu(1)
    angles = model.model.rotary_emb(rows, places[None])
    for layer in model.model.layers[-TAIL:]:
        rows = layer(rows, attention_mask=mask, position_embeddings=angles)
    features = model.model.norm(rows)
    torch.testing.assert_close(features[:, :LENGTH], whole[-1], atol=1e-4, rtol=1e-4)
    tree = TreeShape(autoregressive_levels=1, parallel_levels=LEVELS - 1)
    source = prefilled(TrainedDrafter(drafter, target, tree), tokens, LENGTH)[0].start_tree()
    for level in range(LEVELS):
        got = source.joint(1 + level, None if level == 0 else chain_frontier(7))[0, 0, 0]
        expected = target.logits(features[0, LENGTH + level]).log_softmax(-1)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


FITTING = {"num_experts": 1, "trunk": TRANSFER, "tail_layers": TAIL, "autoregressive_levels": 1}
FITTING |= {"combine": "sum", "parallel_heads": "transfer"}


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({**BRANCH}, "branch"),
        ({"trunk": FEEDBACK, "output_norm": "feedback", **BRANCH}, "branch"),
        ({"trunk": FEEDBACK | TRIGRAM, **MASKS}, "masks"),
        ({"num_experts": 8, "active_experts": 1, **MASKS}, "masks"),
        (FITTING | {"trunk": FEEDBACK}, "transfer"),
        (FITTING | {"num_experts": 2}, "transfer"),
        (FITTING | {"tail_layers": 0}, "transfer"),
    ],
)
def test_settings_that_do_not_fit_the_networks_are_refused(
    settings: dict[str, Any], heads: str
) -> None:
    with pytest.raises(ValidationError, match=f"parallel_heads={heads} requires"):
        tiny_settings(**settings)


@pytest.mark.parametrize("heads", ["experts", "branch", "masks"])
def test_networks_are_named_only_where_there_are_parallel_levels(heads: str) -> None:
    schedule = ScheduleSettings(autoregressive_levels=2, parallel_levels=3, parallel_heads=heads)
    assert (schedule.heads, schedule.depth) == (heads, 5)
    without = ScheduleSettings(autoregressive_levels=2, parallel_heads=heads)
    assert (without.heads, without.depth) == (None, 2)
