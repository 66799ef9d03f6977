"""Losses between distributions over the vocabulary."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import examples_of
from helpers.variants import FEEDBACK, OWN
from torch import Tensor

from jakiro.target.adapter import TargetAdapter
from training.loss.heads import Heads
from training.loss.settings import TokenLoss
from training.loss.vocab_losses import compare_distributions, token_losses

KINDS: tuple[TokenLoss, ...] = ("cross_entropy", "kl", "reverse_kl", "total_variation")


def _log_probs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


TARGET, DRAFT = _log_probs(0.5, 0.25, 0.25), _log_probs(0.25, 0.5, 0.25)


def test_losses_of_two_distributions_are_those_computed_by_hand() -> None:
    log2 = torch.tensor(2.0).log().item()
    hand = {"cross_entropy": 1.75 * log2, "kl": 0.25 * log2, "reverse_kl": 0.25 * log2}
    for kind in KINDS:
        expected = hand.get(kind, 0.25)
        assert token_losses(kind, TARGET, DRAFT).item() == pytest.approx(expected), kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_least_where_the_distributions_are_equal(kind: TokenLoss) -> None:
    logits = TARGET.clone().requires_grad_()
    loss = token_losses(kind, TARGET, logits.log_softmax(-1)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-6
    assert token_losses(kind, TARGET, DRAFT).item() > loss.item()


def test_cross_entropy_and_divergence_have_the_same_gradients() -> None:
    gradients = []
    for kind in ("cross_entropy", "kl"):
        logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
        token_losses(kind, TARGET, logits.log_softmax(-1)).sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_gradients_of_an_own_head_are_those_of_the_whole_sum(chunk_size: int) -> None:
    target = TargetAdapter(tiny_llama().requires_grad_(False))
    settings = tiny_settings(trunk=FEEDBACK, draft_vocab_size=23, **OWN)
    drafter = tiny_drafter(target, settings)
    heads = Heads.of(drafter.draft_head(target))
    count, hidden = 7, 32
    features = torch.randn(count, 2, 2, hidden, requires_grad=True)
    log_weights, targets = torch.randn(count, 2).log_softmax(-1), torch.randn(count, 2, hidden)
    examples = examples_of(features, log_weights, targets, torch.randint(0, 23, (count, 2)))
    importance = torch.rand(count, 2)
    total, _ = compare_distributions(examples, importance, heads, "cross_entropy", chunk_size)
    got = torch.autograd.grad(3 * total, (examples.features, *heads.parameters))
    assert len(heads.parameters) == 2
    step, slope = 1e-3, 0.0
    values = []
    with torch.no_grad():
        direction = [torch.randn_like(part) for part in heads.parameters]
        for sign in (1, -2):
            for part, along in zip(heads.parameters, direction, strict=True):
                part += sign * step * along
            moved = compare_distributions(examples, importance, heads, "cross_entropy", chunk_size)
            values.append(3 * moved[0].item())
        slope = sum((a * b).sum().item() for a, b in zip(got[1:], direction, strict=True))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)
    assert got[0].any()
