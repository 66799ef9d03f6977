"""The drafter's optimizer (AdamW, with or without Muon) and the learning rate of each step."""

import math
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW

from jakiro.utils.devices import native_dtype
from training.config import OptimizerSettings

# Quintic polynomial of K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
# The polynomial is steep at zero, so that a few iterations bring even small singular values near 1,
# although not exactly to 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_MOMENTUM = 0.95
ADAMW_SHARE = 0.15  # ratio of AdamW's learning rate to Muon's when both are used

# Parameters that map to scores of experts or tokens, gains of norms for several layers, and inputs.
_NO_HIDDEN_LAYER = ("router", "own_head", "state_norm", "mixture", "level_masks")


def orthogonalize(
    matrices: Float[Tensor, "matrices rows columns"], *, num_steps: int = 5
) -> Float[Tensor, "matrices rows columns"]:
    """Return matrices with the singular vectors of `matrices` and singular values of 0.7 to 1.2.

    The iterations compute in bfloat16 on devices with instructions for it, otherwise in float32.
    """
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices  # so that the Gram matrix is as small as possible
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    x = x.to(native_dtype(x.device))
    for _ in range(num_steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, polynomial, x, beta=linear)
    return (x.mT if is_tall else x).to(matrices.dtype)


@torch.no_grad()
def take_muon_step(
    parameters: Iterable[Tensor],
    state: MutableMapping[Tensor, dict[str, Tensor]],
    lr: float,
) -> None:
    """Update matrices, or stacks of matrices, from their gradients, which must exist."""
    for alike in _by_shape(parameters):
        gradients = [_gradient(parameter) for parameter in alike]
        directions = [_direction(parameter, state) for parameter in alike]
        torch._foreach_lerp_(directions, gradients, 1 - _MOMENTUM)
        ahead = torch.lerp(torch.stack(gradients), torch.stack(directions), _MOMENTUM)
        rows, columns = ahead.shape[-2:]
        scale = max(1.0, rows / columns) ** 0.5
        updates = orthogonalize(ahead.flatten(0, -3)).view_as(ahead)
        torch._foreach_add_(list(alike), list(updates.unbind()), alpha=-lr * scale)


def _direction(parameter: Tensor, state: MutableMapping[Tensor, dict[str, Tensor]]) -> Tensor:
    if not state[parameter]:
        state[parameter]["direction"] = torch.zeros_like(parameter)
    return state[parameter]["direction"]


def _by_shape(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    return by_shape.values()


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


class MuonBesideAdamW(AdamW):
    """Optimizer that applies Muon to parameter groups marked `muon`, and AdamW to the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
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
    """Return the learning rate at a step, when a fraction of the run's time limit has passed.

    The rate is a function of the step and the time, so checkpoints contain no state of a scheduler.
    """
    warmup = settings.warmup_for(steps)
    risen = min(1.0, (step + 1) / warmup) if warmup else 1.0
    progress = max((step - warmup) / max(1, steps - 1 - warmup), elapsed, 0.0)
    if settings.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    # A run whose time ends during the warm-up ends with a low rate, too.
    return settings.learning_rate * min(risen, 1 - (1 - settings.min_lr_ratio) * progress)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of all parameters, even if DeepSpeed has wrapped the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)
