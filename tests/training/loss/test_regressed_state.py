"""With target layer inference the drafter regresses what these layers read, not what they give."""

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import TinyTraining, batch_for, tiny_training
from torch import Tensor

from training.loss.drafting import draft_all_positions
from training.loss.views import TargetView
from training.module import TrainingModule

SETTINGS = tiny_settings(combine="sum", parallel_levels=0, tail_layers=1)
ROW = 24
BATCH = batch_for(
    SETTINGS, [ROW], [ROW], sequence_length=ROW
)  # rows of one document, without padding


@pytest.fixture(scope="module")
def tiny() -> TinyTraining:
    return tiny_training(SETTINGS)


@pytest.fixture(scope="module")
def view(tiny: TinyTraining) -> TargetView:
    return tiny.view(BATCH)


def feature_loss(tiny: TinyTraining, view: TargetView) -> float:
    """What training reports for a view."""
    module = TrainingModule(tiny.drafter, tiny.objective)
    return module(view, BATCH, tiny.reader(ROW)).feature.item()


def smooth_l1(predicted: Tensor, wanted: Tensor) -> Tensor:
    """The loss of each position, by its definition; the mean over the hidden size."""
    distance = (predicted - wanted).abs()
    return torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean(dim=-1)


@torch.no_grad()
def test_the_feature_loss_is_that_of_the_input_of_the_targets_last_layer(
    tiny: TinyTraining, view: TargetView
) -> None:
    told = tiny.target.model(input_ids=BATCH.token_ids, output_hidden_states=True)
    wanted = told.hidden_states[2]  # of the embedding and three layers
    expected = 0.0
    # Without the tail: the drafter's own output.
    for draw, output in enumerate(draft_all_positions(tiny.drafter, view, BATCH)):
        distance = torch.arange(ROW) - BATCH.anchors[:, draw]
        asked = (distance >= 1) & (torch.arange(ROW) < ROW - 1)
        loss = smooth_l1(output.features[:, :, 0, 0], wanted)
        decayed = loss * tiny.objective.distance_decay ** (distance - 1)
        expected += decayed[asked].sum().item()
    assert feature_loss(tiny, view) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_the_feature_loss_follows_the_state_and_not_the_feature(
    tiny: TinyTraining, view: TargetView
) -> None:
    assert view.tail_input is not None
    loss = feature_loss(tiny, view)
    assert feature_loss(tiny, view._replace(features=view.features + 1.0)) == loss
    assert feature_loss(tiny, view._replace(tail_input=view.tail_input + 1.0)) != loss
