"""The multiple-choice loss trains the expert that gives the next token the most probability."""

import math

import pytest
import torch
from helpers.training import examples_of
from torch import Tensor

from training.loss.heads import Heads
from training.loss.vocab_losses import TermWeights, choice_losses, compare_distributions

VOCAB = 5


def _same(features: Tensor) -> Tensor:
    """A head whose logits are the features."""
    return features


def test_the_loss_is_the_one_computed_by_hand() -> None:
    weights = torch.tensor([[0.25, 0.75], [0.25, 0.75], [1.0, 0.0]])
    probs = torch.tensor([[0.5, 0.1], [0.2, 0.4], [0.5, 0.9]])
    got = choice_losses((weights * probs).log(), weights.log())
    expected = [-0.25 * math.log(0.5), -0.75 * math.log(0.4), -math.log(0.5)]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_a_token_that_no_expert_can_draft_has_no_loss_and_no_gradient() -> None:
    joint = torch.full((1, 2), float("-inf"), requires_grad=True)
    loss = choice_losses(joint, torch.tensor([[0.5, 0.5]]).log())
    assert loss.item() == 0
    (slope,) = torch.autograd.grad(loss.sum(), joint)
    assert not slope.any()


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_gradients_reach_only_the_chosen_expert(chunk_size: int) -> None:
    torch.manual_seed(0)
    count, levels, experts = 9, 2, 4
    features = torch.randn(count, levels, experts, VOCAB, requires_grad=True)
    log_weights = torch.randn(count, experts).log_softmax(-1).requires_grad_()
    tokens = torch.randint(0, VOCAB, (count, levels))
    targets = torch.randn(count, levels, VOCAB)
    examples = examples_of(features, log_weights, targets, tokens)
    total, results = compare_distributions(
        examples,
        torch.ones(count, levels),
        Heads(_same, _same),
        "cross_entropy",
        chunk_size,
        TermWeights(token=0.0, choice=2.0),
    )
    torch.testing.assert_close(total, 2 * results.choice_loss.sum())
    slopes, of_router = torch.autograd.grad(total, (features, log_weights))
    at_token = features.softmax(-1).take_along_dim(tokens[:, :, None, None], -1).squeeze(-1)
    chosen = at_token.argmax(-1, keepdim=True)
    is_reached = slopes.abs().amax(-1) > 1e-8
    assert torch.equal(is_reached, torch.zeros_like(is_reached).scatter(-1, chosen, True))
    assert of_router.abs().max() < 1e-6
    # The gradient of cross-entropy, times the weight of the chosen expert.
    weight = results.weights.gather(-1, chosen)
    one_hot = torch.nn.functional.one_hot(tokens, VOCAB)
    found = features.take_along_dim(chosen[..., None], 2).squeeze(2)
    expected = 2 * weight * (found.softmax(-1) - one_hot)
    got = slopes.take_along_dim(chosen[..., None], 2).squeeze(2)
    torch.testing.assert_close(got, expected.detach())
