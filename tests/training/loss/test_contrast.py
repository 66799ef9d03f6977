"""The contrastive feature loss selects the right negatives."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from training.loss.objectives import contrastive_loss

TEMPERATURE = 0.1


@pytest.fixture
def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    predicted, goal = torch.randn(2, 6, 4, generator=generator)
    return predicted, goal


def by_hand(predicted: Tensor, goal: Tensor, index: int, negatives: list[int]) -> Tensor:
    candidates = [index, *negatives]
    similarity = cosine_similarity(predicted[index], goal[candidates]) / TEMPERATURE
    return -similarity.log_softmax(dim=0)[0]


def test_negatives_are_valid_positions_of_the_sequence_with_another_best_token(
    features: tuple[Tensor, Tensor],
) -> None:
    best = torch.tensor([1, 2, 1, 3, 2, 9])
    valid = torch.tensor([True, True, True, False, True, True])
    losses = contrastive_loss(*features, best, valid, (5, 1), TEMPERATURE)
    negatives = {0: [1, 4], 1: [0, 2], 2: [1, 4], 4: [0, 2], 5: []}
    for index, others in negatives.items():
        torch.testing.assert_close(losses[index], by_hand(*features, index, others))


def test_norms_of_features_do_not_matter(features: tuple[Tensor, Tensor]) -> None:
    predicted, goal = features
    arguments = torch.arange(6), torch.ones(6, dtype=torch.bool), (6,), TEMPERATURE
    torch.testing.assert_close(
        contrastive_loss(predicted, goal, *arguments),
        contrastive_loss(3 * predicted, goal / 7, *arguments),
    )


def test_pointing_at_the_own_feature_is_rewarded(features: tuple[Tensor, Tensor]) -> None:
    _, goal = features
    arguments = torch.arange(6), torch.ones(6, dtype=torch.bool), (6,), TEMPERATURE
    right = contrastive_loss(goal, goal, *arguments)
    wrong = contrastive_loss(goal.roll(1, dims=0), goal, *arguments)
    assert (right < wrong).all()
