"""Levels that masks predict equal those of a causal pass in which masks follow the tokens."""

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import FEEDBACK, MASKS, TRIGRAM
from pydantic import ValidationError

from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from moa.trunk import TrunkInputs

PARALLEL = tiny_settings(parallel_levels=3, autoregressive_levels=1, trunk=FEEDBACK, **MASKS)


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
            torch.cat((own[:, : 1 + query], behind[None]), dim=1)
            for own, behind in ((tokens, masks.tokens), (features, masks.features))
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


@pytest.mark.parametrize(
    "changes",
    [{"trunk": FEEDBACK | TRIGRAM}, {"num_experts": 8, "active_experts": 1}],
    ids=["trigram", "sparse"],
)
def test_masks_that_could_not_stand_for_a_token_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="parallel_heads=masks requires"):
        tiny_settings(**changes, **MASKS)
