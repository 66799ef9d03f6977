"""The multiple-choice loss trains the expert that gives the next token the most probability."""

import math
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import random_batch, tiny_run, tiny_training
from torch import Tensor

from jakiro.errors import ConfigError
from training.evaluation.metrics import read_metrics
from training.loss.heads import Heads
from training.loss.positions import Examples
from training.loss.vocab_losses import TermWeights, choice_losses, compare_distributions
from training.train import train

VOCAB = 5


def _examples(features: Tensor, log_weights: Tensor, tokens: Tensor) -> Examples:
    count, levels = features.shape[:2]
    return Examples(
        features=features,
        log_weights=log_weights,
        gate=log_weights.exp(),
        targets=torch.randn(count, levels, VOCAB),
        next_tokens=tokens,
        valid=torch.ones(count, levels, dtype=torch.bool),
        weight=torch.ones(count),
        sequence_sizes=(count,),
        indices=torch.arange(count),
    )


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
    examples = _examples(features, log_weights, tokens)
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


def test_a_drafter_learns_with_the_loss_alone() -> None:
    tiny = tiny_training(tiny_settings(2, parallel_levels=1))
    batch = random_batch([24])
    only = {"token_weight": 0.0, "feature_weight": 0.0, "contrast_weight": 0.0}
    only |= {"balance_weight": 0.0, "multiple_choice_weight": 1.0}
    optimizer = torch.optim.AdamW(tiny.drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        terms = tiny.loss(batch, **only)
        losses.append(terms.total.item())
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_run_records_the_loss(workshop: Path) -> None:
    changes = {"objective": {"multiple_choice_weight": 0.5}, "run_folder": str(workshop / "choice")}
    settings = tiny_run(workshop, **changes, steps=2, checkpoint={"every": None})
    train(settings)
    lines = [line for line in read_metrics(settings.run_folder) if "loss" in line]
    assert all(line["levels"][0]["multiple_choice"] > 0 for line in lines)
    assert all(len(line["expert_load"]) == 2 for line in lines)


def test_experts_that_share_one_distribution_are_refused(tmp_path: Path) -> None:
    changes = {"experts": {"combine": "sum"}}
    with pytest.raises(ConfigError, match="multiple_choice_weight 0"):
        tiny_run(tmp_path, drafter=changes, objective={"multiple_choice_weight": 0.5})
