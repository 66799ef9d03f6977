"""With tail layers, the feature loss is computed on their input, not on their output."""

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import TinyTraining, batch_for, tiny_training
from torch import Tensor

from training.loss.batch import TargetView
from training.loss.drafting import draft_all_positions
from training.module import TrainingModule

SETTINGS = tiny_settings(combine="sum", parallel_levels=0, tail_layers=1)
LENGTH = 24
# Sequences of one document, without padding.
BATCH = batch_for(SETTINGS, [LENGTH], [LENGTH], sequence_length=LENGTH)


@pytest.fixture(scope="module")
def tiny() -> TinyTraining:
    return tiny_training(SETTINGS)


@pytest.fixture(scope="module")
def view(tiny: TinyTraining) -> TargetView:
    return tiny.view(BATCH)


def feature_loss(tiny: TinyTraining, view: TargetView) -> float:
    """Return the feature loss that training reports for a view."""
    module = TrainingModule(tiny.drafter, tiny.objective)
    return module(view, BATCH, tiny.reader(LENGTH)).feature.item()


def smooth_l1(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return the smooth L1 loss of each position, as the mean over the hidden size."""
    distance = (predicted - wanted).abs()
    return torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean(dim=-1)


@torch.no_grad()
def test_the_feature_loss_is_that_of_the_input_of_the_targets_last_layer(
    tiny: TinyTraining, view: TargetView
) -> None:
    outputs = tiny.target.model(input_ids=BATCH.token_ids, output_hidden_states=True)
    wanted = outputs.hidden_states[2]  # index 0 is the embedding, and there are three layers
    expected = 0.0
    # The drafter's own output, since no tail is given.
    for sample, output in enumerate(draft_all_positions(tiny.drafter, view, BATCH)):
        distance = torch.arange(LENGTH) - BATCH.anchors[:, sample]
        has_loss = (distance >= 1) & (torch.arange(LENGTH) < LENGTH - 1)
        loss = smooth_l1(output.features[:, :, 0, 0], wanted)
        decayed = loss * tiny.objective.distance_decay ** (distance - 1)
        expected += decayed[has_loss].sum().item()
    assert feature_loss(tiny, view) == pytest.approx(expected, rel=1e-4)
