"""Transferred states give the same drafts as rows beside the verified tokens in the same pass."""

from typing import Any

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import FEEDBACK, TRANSFER, VARIANTS
from pydantic import ValidationError

from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

SETTINGS = VARIANTS["hidden-transfer"]
LENGTH, LEVELS, TAIL = 8, 4, 2


@torch.no_grad()
def test_levels_equal_those_of_rows_beside_the_verified_tokens() -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    drafter = tiny_drafter(target, SETTINGS)
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


@pytest.mark.parametrize(
    "changes",
    [
        {"trunk": FEEDBACK},
        {"num_experts": 2},
        {"tail_layers": 0},
    ],
    ids=str,
)
def test_settings_that_transferred_states_would_ignore_are_refused(changes: dict[str, Any]) -> None:
    fitting = {"num_experts": 1, "trunk": TRANSFER, "tail_layers": TAIL, "autoregressive_levels": 1}
    fitting |= {"combine": "sum", "parallel_heads": "transfer"}
    with pytest.raises(ValidationError, match="parallel_heads=transfer requires"):
        tiny_settings(**(fitting | changes))
