"""Losses between distributions over the vocabulary."""

import pytest
import torch
from torch import Tensor

from training.loss.vocab_losses import TokenLoss, token_losses

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
