"""Every parameter of every drafter is trained."""

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import random_batch, tiny_training
from helpers.variants import FUSED, GRID, VARIANTS

from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch
from training.loss.drafting import draft_all_positions
from training.module import TrainingModule

LEARNERS = [name for name in VARIANTS if name != "block-dspark"]
STACKED = ("experts.down", "experts.level_down", "memory_encoder.project_layers.weight")


def _batch(settings: DrafterSettings) -> Batch:
    kind = "ttt" if settings.trunk.reads_features else "blocks"
    kind = "roots" if settings.trunk.is_block else kind
    batch = random_batch([12, 9], [20])
    starts = (torch.arange(24) - batch.positions).numpy()
    rule = AnchorRule(kind, num_levels=3, num_samples=2)
    anchors = [torch.from_numpy(rule.anchors(own, (0, n))) for n, own in enumerate(starts)]
    return Batch(**(vars(batch) | {"anchors": torch.stack(anchors)}))


def assert_all_is_trained(settings: DrafterSettings) -> None:
    tiny = tiny_training(settings)
    names = [name for name, _ in tiny.drafter.named_parameters()]
    gradients = tiny.gradients(tiny.loss(_batch(settings)).total)
    for name, gradient in zip(names, gradients, strict=True):
        if name == "experts.router.weight" and settings.experts.num_experts == 1:
            continue  # the router has no choice
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        parts = gradient.flatten(0, 1 if name == "experts.level_down" else 0)
        each = parts if name in STACKED else gradient[None]
        assert all(part.any() for part in each), name


@pytest.mark.parametrize("name", LEARNERS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    assert_all_is_trained(VARIANTS[name])


def test_imported_tables_of_paths_do_not_learn() -> None:
    with pytest.raises(ConfigError, match="cannot learn"):
        tiny_training(VARIANTS["block-dspark"]).module()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRID if name != "block-dspark"])
def test_every_parameter_gets_a_gradient_in_all_combinations(name: str) -> None:
    assert_all_is_trained(GRID[name])


def test_a_rollout_learns_through_the_features_that_it_feeds_back() -> None:
    """The directional derivative of the second drafted token's features is correct.

    The derivative with respect to the parameters is compared with a finite difference.
    """
    tiny = tiny_training(tiny_settings(trunk=FUSED))
    batch = _batch(tiny.drafter.config.settings)
    view, drafter = tiny.view(batch).to(torch.float64), tiny.drafter.double()
    features = torch.randn(2, 24, 2, 2, 32, dtype=torch.float64)

    def projected() -> torch.Tensor:
        _, second = draft_all_positions(drafter, view, batch)
        return (second.features * features).sum()

    parameters = list(drafter.parameters())
    direction = [torch.randn_like(part) for part in parameters]
    slope = sum(
        (gradient * along).sum()
        for gradient, along in zip(
            torch.autograd.grad(projected(), parameters), direction, strict=True
        )
    )
    with torch.no_grad():
        values = []
        for step in (1e-6, -2e-6):
            for part, along in zip(parameters, direction, strict=True):
                part.add_(along, alpha=step)
            values.append(projected())
    # The tolerance allows for rotary angles in float32.
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("error")  # such as of norms whose input and weight differ in dtype
@pytest.mark.parametrize("name", ["feedback-fused", "block-recurrent", "E16-2-active-P2"])
def test_products_in_bfloat16_give_float32_gradients_in_the_same_direction(name: str) -> None:
    settings = VARIANTS[name]
    tiny, batch = tiny_training(settings), _batch(settings)
    found = []
    for autocast in (False, True):
        module = TrainingModule(tiny.drafter, tiny.objective, autocast=autocast)
        total = module(tiny.view(batch), batch, tiny.reader(24)).total
        gradients = [part for part in tiny.gradients(total) if part is not None]
        assert all(part.dtype == torch.float32 for part in gradients)
        found.append(torch.cat([part.flatten() for part in gradients]))
    exact, rounded = found
    assert not torch.equal(exact, rounded)
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.995
