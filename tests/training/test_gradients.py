"""Every parameter of every drafter is trained."""

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import random_batch, tiny_training
from helpers.variants import FUSED, GRID, VARIANTS

from jakiro.config import DrafterSettings
from training.anchors import AnchorRule
from training.batch import Batch

STACKED = ("bank.down", "bank.level_down", "memory_encoder.project_layers.weight")


def _batch(settings: DrafterSettings) -> Batch:
    kind = "rollout" if settings.trunk.kind == "feedback" else "blocks"
    batch = random_batch([12, 9], [20])
    starts = (torch.arange(24) - batch.positions).numpy()
    rule = AnchorRule(kind, num_levels=3, draws=2)
    anchors = [torch.from_numpy(rule.anchors(one, (0, n))) for n, one in enumerate(starts)]
    return Batch(**(vars(batch) | {"anchors": torch.stack(anchors)}))


def assert_all_is_trained(settings: DrafterSettings) -> None:
    tiny = tiny_training(settings)
    names = [name for name, _ in tiny.drafter.named_parameters()]
    gradients = tiny.gradients(tiny.loss(_batch(settings)).total)
    for name, gradient in zip(names, gradients, strict=True):
        if name == "bank.router.weight" and settings.bank.num_experts == 1:
            continue  # there is nothing to choose
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        parts = gradient.flatten(0, 1 if name == "bank.level_down" else 0)
        each = parts if name in STACKED else gradient[None]
        assert all(one.any() for one in each), name


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    assert_all_is_trained(VARIANTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_every_parameter_gets_a_gradient_for_all_that_is_offered(name: str) -> None:
    assert_all_is_trained(GRID[name])


def test_a_rollout_learns_through_the_features_that_it_feeds_back() -> None:
    """The loss at distance 2 alone depends on the pass at distance 1, and trains it."""
    settings = tiny_settings(combine="sum", parallel_levels=0, trunk=FUSED)
    tiny = tiny_training(settings)
    batch = _batch(settings)
    second = Batch(**(vars(batch) | {"is_response": batch.is_response & (batch.positions == 3)}))
    whole = tiny.gradients(tiny.loss(second).total)
    assert all(gradient.isfinite().all() for gradient in whole)
    names = [name for name, _ in tiny.drafter.named_parameters()]
    assert whole[names.index("memory_encoder.output.weight")].any()
