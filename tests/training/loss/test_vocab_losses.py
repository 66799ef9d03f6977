"""Losses between distributions over the vocabulary."""

import math
from typing import get_args

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import examples_of
from helpers.variants import FEEDBACK, OWN
from torch import Tensor

from jakiro.target.adapter import TargetAdapter
from training.loss.heads import Heads
from training.loss.settings import TokenLoss
from training.loss.vocab_losses import (
    TermWeights,
    compare_distributions,
    dpace_weights,
    token_losses,
)

KINDS: tuple[TokenLoss, ...] = get_args(TokenLoss)


def _log_probs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


TARGET, DRAFT = _log_probs(0.5, 0.25, 0.25), _log_probs(0.25, 0.5, 0.25)


def test_losses_of_two_distributions_are_those_computed_by_hand() -> None:
    log2, share = math.log(2), math.exp(-3 * 0.75)
    hand = {"cross_entropy": 1.75 * log2, "kl": 0.25 * log2, "reverse_kl": 0.25 * log2}
    hand |= {"total_variation": 0.25, "ce_tv": 0.175 * log2 + 0.225}
    hand |= {"lk_hybrid": share * 0.25 * log2 + (1 - share) * 0.25}
    for kind in KINDS:
        assert token_losses(kind, TARGET, DRAFT).item() == pytest.approx(hand[kind]), kind


@pytest.mark.parametrize("kind", ["ce_tv", "lk_hybrid"])
@pytest.mark.parametrize("drafted", [None, [1, 4, 5, 8]])
def test_losses_of_acceptance_have_the_gradients_of_their_formulas(
    kind: TokenLoss, drafted: list[int] | None
) -> None:
    whole = (2 * torch.randn(6, 11, dtype=torch.float64)).softmax(-1)
    p = whole if drafted is None else whole[:, drafted]
    logits = (2 * torch.randn(p.shape, dtype=torch.float64)).requires_grad_()
    q = torch.exp(logits) / torch.exp(logits).sum(dim=1, keepdim=True)
    overlap = torch.where(p < q, p, q).sum(dim=1)
    if kind == "ce_tv":
        expected = -0.1 * (p * torch.log(q)).sum(dim=1) + 0.9 * (1 - overlap)
    else:
        share = torch.exp(-3 * overlap).detach()
        expected = share * (p * torch.log(p / q)).sum(dim=1) + (1 - share) * (1 - overlap)
    got = token_losses(kind, p.log(), logits.log_softmax(-1))
    torch.testing.assert_close(got, expected)
    slopes = [torch.autograd.grad(one.sum(), logits, retain_graph=True) for one in (got, expected)]
    torch.testing.assert_close(*slopes)
    assert slopes[0][0].abs().max() > 0.01


def test_weights_of_dpace_are_those_of_a_loop_and_end_with_the_text() -> None:
    probs, exists = torch.rand(40, 4).requires_grad_(), torch.rand(40, 4) < 0.7
    got = dpace_weights(probs, exists)
    assert not got.requires_grad
    for row in range(40):
        depth = next((k for k in range(4) if not exists[row, k]), 4)
        shares = [0.5 * probs[row, k].item() + 0.5 for k in range(depth)]
        for k in range(4):
            expected = sum(math.prod(shares[: j + 1]) for j in range(k, depth))
            assert got[row, k].item() == pytest.approx(expected)


def test_dpace_multiplies_the_losses_of_tokens_and_has_no_gradient() -> None:
    target = TargetAdapter(tiny_llama().requires_grad_(False))
    drafter = tiny_drafter(target, tiny_settings(draft_vocab_size=23))
    heads = Heads.of(drafter.draft_head(target))
    features = torch.randn(9, 3, 2, 32, requires_grad=True)
    weights, tokens = torch.randn(9, 2).log_softmax(-1), torch.randint(0, 26, (9, 3))
    examples = examples_of(features, weights, torch.randn(9, 3, 32), tokens)
    importance = torch.rand(9, 3) * (torch.arange(3) < torch.tensor([1, 2, 3] * 3)[:, None])
    prior, probs = weights.exp(), []
    for level in range(3):
        draft = heads.draft(features[:, level].detach()).softmax(-1)
        of_text = [
            draft[n, :, t] if t < 23 else torch.zeros(2) for n, t in enumerate(tokens[:, level])
        ]
        joint = prior * torch.stack(of_text)
        probs.append(joint.sum(dim=1))
        prior = torch.where(probs[-1][:, None] > 0, joint / probs[-1][:, None], prior)
    constant = importance * dpace_weights(torch.stack(probs, dim=1), importance > 0)
    totals = [
        compare_distributions(examples, of_levels, heads, "ce_tv", 4, TermWeights(by_level=rule))[0]
        for of_levels, rule in ((importance, "dpace"), (constant, "decay"))
    ]
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(*(torch.autograd.grad(total, features) for total in totals))


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
