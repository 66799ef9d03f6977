"""The feed-forward part of a target's layer, read in the form that the expert bank has."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.target import TargetAdapter
from training.target_attention import layers_of, residual_factor_of
from training.target_matrix import FLOATS, gain_of, have_matrices, left_behind_by, matrix_of

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GATES = ("silu", "swish")
_FURTHER_NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_mlp_layernorm",
)


class LayerFeedForward(NamedTuple):
    """Weights of `down(silu(gate(n)) * up(n))`, where n is the norm of the stream after attention.

    Attributes:
        gate: of the inner units.
        up: likewise.
        down: of what they add to the stream.
        gain: of the norm before them.
        left_behind: names of parameters for which the bank has no place: biases.
        module: reads the inner units' activations.
    """

    gate: Float[Tensor, "units hidden"]
    up: Float[Tensor, "units hidden"]
    down: Float[Tensor, "hidden units"]
    gain: Float[Tensor, " hidden"]
    left_behind: tuple[str, ...]
    module: nn.Module


@torch.no_grad()
def read_feed_forward(target: TargetAdapter, index: int) -> LayerFeedForward | None:
    """Return the feed-forward weights of a layer, as views where possible; None for another form.

    Args:
        target: the frozen target.
        index: of the layer; negative from the end.
    """
    layer = layers_of(target)[index]
    part = getattr(layer, "mlp", None)
    norm = getattr(layer, "post_attention_layernorm", None)
    if norm is None or any(hasattr(layer, name) for name in _FURTHER_NORMS):
        return None
    if part is None or not have_matrices(part, _PROJECTIONS):
        return None
    if getattr(target.config, "hidden_act", None) not in _GATES:
        return None
    gate, up, down = (matrix_of(getattr(part, name)) for name in _PROJECTIONS)
    hidden = target.spec.hidden_size
    shapes = [tuple(one.shape) for one in (gate, up, down.T)]
    are_floats = all(one.dtype in FLOATS for one in (gate, up, down))
    if not are_floats or shapes != [(len(gate), hidden)] * 3:
        return None
    return LayerFeedForward(
        gate=gate,
        up=up,
        down=down * residual_factor_of(layer),
        gain=gain_of(norm, gate),
        left_behind=left_behind_by(part, _PROJECTIONS, norm),
        module=part.down_proj,
    )
