"""Levels without a trunk: independent heads with one expert, a joint distribution with several."""

import pytest
import torch
from helpers.drafting import prefilled, score_of_path
from helpers.models import tiny_drafter, tiny_llama
from helpers.training import examples_of
from helpers.variants import VARIANTS
from torch.nn.functional import linear, rms_norm, silu

from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from moa.trunk import TrunkInputs
from training.loss.heads import Heads
from training.loss.vocab_losses import compare_distributions

LENGTH = 8
PATH = [7, 19, 5, 42]


@torch.no_grad()
def test_one_expert_gives_independent_heads_on_the_feature_as_in_medusa() -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, VARIANTS["medusa"])
    tree = TreeShape(autoregressive_levels=1, parallel_levels=3)
    tokens = torch.randint(0, 61, (1, LENGTH + 1))
    session, output = prefilled(TrainedDrafter(model, target, tree), tokens, LENGTH)
    feature, experts = output.features[0, -1], model.experts
    inner = linear(rms_norm(feature, feature.shape, eps=1e-6), experts.gate_up.weight)
    inner = silu(inner[:24]) * inner[24:]
    expected = 0.0
    for token, down in zip(PATH, [experts.down[0], *experts.level_down[:, 0]], strict=True):
        expected += target.logits(feature + inner @ down).log_softmax(-1)[token].item()
    assert score_of_path(session.start_tree(), PATH) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_a_path_has_the_probability_of_the_decomposed_joint_distribution() -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, VARIANTS["tensor"])
    drafter = TrainedDrafter(model, target, TreeShape(autoregressive_levels=1, parallel_levels=3))
    tokens = torch.randint(0, 61, (1, LENGTH + 1))
    session, output = prefilled(drafter, tokens, LENGTH)
    root, unread = target.embed(tokens[:, -1:]), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    inputs = TrunkInputs(output.features[:, -1:])
    levels = model(root, torch.tensor([[LENGTH]]), unread, inputs)
    terms = levels.log_weights[0, 0].clone()
    for level, token in enumerate(PATH):
        terms += drafter.head.log_probs(levels.features[0, 0, level])[:, token]
    joint = terms.logsumexp(0).item()
    assert score_of_path(session.start_tree(), PATH) == pytest.approx(joint, abs=1e-4)


def test_the_token_losses_of_all_levels_add_up_to_that_of_the_joint_distribution() -> None:
    count, levels, components, vocab = 5, 3, 4, 6
    next_tokens = torch.randint(0, vocab, (count, levels))
    logits = torch.randn(count, levels, components, vocab, requires_grad=True)
    log_weights = torch.randn(count, components).log_softmax(-1).requires_grad_()
    certain = torch.nn.functional.one_hot(next_tokens, vocab).float()
    # The target is sure of the next token.
    examples = examples_of(logits, log_weights, 1e4 * certain, next_tokens)
    importance, heads = torch.ones(count, levels), Heads(lambda x: x, lambda x: x)
    total, _ = compare_distributions(examples, importance, heads, "cross_entropy", 2)
    chosen = (logits.log_softmax(-1) * certain[:, :, None]).sum(-1)
    joint = -(log_weights + chosen.sum(1)).logsumexp(-1).sum()
    torch.testing.assert_close(total, joint)
    got, expected = (torch.autograd.grad(loss, (logits, log_weights)) for loss in (total, joint))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
