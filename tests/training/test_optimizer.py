"""The learning rate follows its schedule, and only matrices decay."""

import pytest
from torch import nn

from training.config import OptimizerSettings
from training.optimizer import build_optimizer, learning_rate

STEPS = 101


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_the_rate_rises_to_the_peak_and_falls_to_the_floor(schedule: str, middle: float) -> None:
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=20, schedule=schedule, floor=0.1)
    rates = [learning_rate(settings, step, STEPS) for step in range(STEPS)]
    assert rates[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    assert rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(2.0 * middle)
    assert rates[-1] == pytest.approx(0.2)
    assert sorted(rates[20:], reverse=True) == rates[20:]


@pytest.mark.parametrize("warmup_steps", [0, 1, STEPS])
def test_any_length_of_warm_up_works(warmup_steps: int) -> None:
    settings = OptimizerSettings(warmup_steps=warmup_steps)
    rates = [learning_rate(settings, step, STEPS) for step in range(STEPS)]
    assert max(rates) == pytest.approx(settings.learning_rate)
    assert min(rates) > 0


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2))
    optimizer = build_optimizer(module, OptimizerSettings(weight_decay=0.3))
    decays = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {p: 0.3 if p.ndim > 1 else 0.0 for p in module.parameters()}
