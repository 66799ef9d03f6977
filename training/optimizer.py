"""AdamW for the drafter, and its learning rate over the steps."""

import math
from typing import Any

from torch import nn
from torch.optim import AdamW

from training.config import OptimizerSettings


def build_optimizer(module: nn.Module, settings: OptimizerSettings) -> AdamW:
    """Return AdamW over all parameters; only matrices decay."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """Return the rate of a step, counted from zero: a rise to the peak, then a fall to the floor.

    It is a function of the step alone, so a resumed run needs no state of it.

    Args:
        settings: peak, shape, and floor.
        step: counted from zero.
        steps: of the whole run.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
    if settings.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return settings.learning_rate * (1 - (1 - settings.floor) * progress)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the rate of all parameters, also through DeepSpeed's wrappers of an optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = rate
