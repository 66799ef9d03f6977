"""The weights of a drafter that adaptation may change, and their replacement in place."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from jakiro.errors import CheckpointError
from jakiro.utils.files import fingerprint

# Matrices that adapters change, by the ends of their names. Those that encode the target's states
# are not among them, so memory and features are the same for all versions.
ADAPTED = (
    "self_attention.project",
    "self_attention.output",
    "cross_attention.query",
    "cross_attention.output",
    "feature_input.join",
    "experts.gate_up",
    "experts.down",
)
_NUM_SAMPLES = 256  # number of values of each tensor that identify a drafter


def adapted_ends(model: nn.Module) -> tuple[str, ...]:
    """Return those of the ends in `ADAPTED` with which parameters of a drafter end."""
    names = [name for name, _ in model.named_parameters()]
    # The projections of a block also encode memory.
    kept = {"self_attention.project"} if "trunk.memory_norm.weight" in names else set()
    ends = (end for end in ADAPTED if end not in kept)
    return tuple(end for end in ends if any(_ends_with(name, end) for name in names))


def adapted_names(model: nn.Module) -> list[str]:
    names, ends = (name for name, _ in model.named_parameters()), adapted_ends(model)
    return [name for name in names if any(_ends_with(name, end) for end in ends)]


def identity_of_drafter(model: nn.Module, target: str, dtype: torch.dtype) -> str:
    """Return a fingerprint of a drafter's own weights and of its target.

    Args:
        dtype: dtype in which the values are compared.
    """
    return fingerprint(target, str(dtype), sampled_weights(model, dtype))[:32]


def sampled_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return some weights of each parameter, rounded to a dtype."""
    values = {}
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(len(flat) // _NUM_SAMPLES, 1)][:_NUM_SAMPLES]
        values[name] = sample.to(dtype).double().nan_to_num().tolist()
    return values


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".removesuffix(".weight").endswith(f".{end}")


class ReplaceableWeights:
    """The adapted weights of a drafter, which can be replaced while nothing is drafted.

    Weights are written in place, so that packed copies, compiled functions and open sessions use
    the new ones.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        self._current = {name: parameters[name] for name in adapted_names(model)}
        self._original = {name: weight.detach().clone() for name, weight in self._current.items()}

    def check(self, weights: Mapping[str, Tensor]) -> None:
        shapes = {name: weight.shape for name, weight in weights.items()}
        if shapes != {name: weight.shape for name, weight in self._original.items()}:
            raise CheckpointError("the weights do not belong to this drafter")
        for name, weight in weights.items():
            if not weight.to(self._original[name].dtype).isfinite().all():
                raise CheckpointError(
                    f"the weights are not finite numbers, such as those of {name}"
                )

    @torch.no_grad()
    def use(self, weights: Mapping[str, Tensor] | None) -> None:
        """Replace the weights by others, which were checked; None for the drafter's own."""
        for name, weight in self._current.items():
            weight.copy_(self._original[name] if weights is None else weights[name])
