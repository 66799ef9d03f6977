"""The drafter's optimizer (AdamW, with or without Muon) and the learning rate of each step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from training.config import OptimizerSettings
from training.loop.muon import take_muon_step

ADAMW_SHARE = 0.15  # ratio of AdamW's learning rate to Muon's when both are used


# Parameters that map to scores of experts or tokens, gains of norms for several layers, and inputs.
_NO_HIDDEN_LAYER = ("router", "own_head", "state_norm", "level_masks")


class MuonBesideAdamW(AdamW):
    """Optimizer that applies Muon to parameter groups marked `muon`, and AdamW to the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient."""
        assert closure is None, "the DeepSpeed engine computes the gradients"
        groups = self.param_groups
        for group in groups:
            if group.get("muon"):
                take_muon_step(group["params"], self.state, group["lr"])
        try:
            self.param_groups = [group for group in groups if not group.get("muon")]
            super().step()
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state; AdamW does not see Muon's groups, because they have no step count."""
        groups = state["param_groups"]
        super().__setstate__(
            state | {"param_groups": [group for group in groups if not group.get("muon")]}
        )
        self.param_groups = groups


def build_optimizer(module: nn.Module, settings: OptimizerSettings) -> AdamW:
    """Return the optimizer of all trainable parameters; AdamW decays only matrices."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if settings.kind == "muon":
        return _build_muon(module, settings)
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


def _build_muon(module: nn.Module, settings: OptimizerSettings) -> AdamW:
    """Return an optimizer that applies Muon to matrices of hidden layers, and AdamW to the rest."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    hidden = [
        p for name, p in named if p.ndim > 1 and not any(part in name for part in _NO_HIDDEN_LAYER)
    ]
    is_hidden = set(map(id, hidden))
    others = [p for _, p in named if id(p) not in is_hidden]
    groups = [
        {"params": hidden, "muon": True, "share": 1.0},
        {"params": others, "weight_decay": 0.0, "share": ADAMW_SHARE},
    ]
    return MuonBesideAdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def learning_rate(
    settings: OptimizerSettings, step: int, steps: int, elapsed: float = 0.0
) -> float:
    """Return the learning rate at an optimizer step; the rate rises to its peak and then decays.

    The rate is a function of the step and the time, so checkpoints contain no state of a scheduler.

    Args:
        elapsed: fraction of the run's time limit that has passed, from 0 to 1; 0 without a limit.
    """
    warmup = settings.warmup_for(steps)
    risen = min(1.0, (step + 1) / warmup) if warmup else 1.0
    progress = max((step - warmup) / max(1, steps - 1 - warmup), elapsed, 0.0)
    if settings.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    # A run whose time ends during the warm-up ends with a low rate, too.
    return settings.learning_rate * min(risen, 1 - (1 - settings.min_lr_ratio) * progress)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of all parameters, even if DeepSpeed has wrapped the optimizer.

    Args:
        rate: learning rate; AdamW gets a fraction of this rate if Muon is used as well.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)
