"""The weights of one layer of a target, converted to the form of the drafter's layers."""

from collections.abc import Collection
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from jakiro.target.step import StepInput

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_POSITIONS = 8  # number of positions at which keys are compared
_TOLERANCE = 0.02  # share of the keys' mean magnitude, above the rounding error of half precision
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("input_layernorm", "attention_layernorm")  # absent if no norm precedes attention
_FEED_FORWARD_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GATES = ("silu", "swish")
_FURTHER_NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_mlp_layernorm",
)


def have_matrices(owner: object, names: Collection[str]) -> bool:
    """Return whether an object has linear layers with these names, each with a weight."""
    parts = (getattr(owner, name, None) for name in names)
    return all(isinstance(getattr(part, "weight", None), Tensor) for part in parts)


def matrix_of(linear: nn.Module) -> Tensor:
    """Return the matrix [out, in] of a linear layer, with its adapters (PEFT) merged.

    A quantized layer does not store such a matrix, so its weight is returned as it is stored.
    """
    weight: Tensor = linear.weight  # type: ignore[assignment]
    if not isinstance(linear, BaseTunerLayer) or weight.dtype not in FLOATS:
        return weight
    if linear.disable_adapters:
        return weight
    whole: Any = deepcopy(linear)
    whole.merge()
    return whole.get_base_layer().weight.detach()


def gain_of(norm: nn.Module | None, like: Float[Tensor, "_ hidden"]) -> Float[Tensor, " hidden"]:
    """Return the gain of each channel of a norm, whatever the form of its weight."""
    count = like.shape[1]
    if norm is None:
        return like.new_ones(count)
    # The norm is applied to inputs of +64 and -64, with mean 0 and mean square 2^12. In float32,
    # adding an epsilon does not change this mean square, and its root is exact.
    signs = 1.0 - 2.0 * (torch.arange(count, device=like.device) % 2).to(like.dtype)
    return (norm(64 * signs) - norm(-64 * signs)) / 2 * signs


@torch.no_grad()
def is_interleaved(target: TargetAdapter, layer: int) -> bool | None:
    """Return whether the channels of a rotated pair of keys are adjacent, not half a head apart.

    The result is None if keys are not rotated or, unless channels are adjacent, if only a part of
    the head is rotated: unrotated adjacent pairs look like slowly rotating pairs.
    """
    keys = _keys_of_one_token(target, layer)
    if not _differ(keys[:1], keys):
        return None
    for is_adjacent in (False, True):
        halves = in_halves(keys) if is_adjacent else keys
        lengths = torch.hypot(*halves.chunk(2, dim=-1))  # a rotation keeps the lengths of pairs
        if not _differ(lengths[:1], lengths):
            return is_adjacent
    return None


def in_halves(heads: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Return heads in which the adjacent channels of each pair are moved half a head apart."""
    return torch.cat((heads[..., ::2], heads[..., 1::2]), dim=-1)


def _keys_of_one_token(target: TargetAdapter, layer: int) -> Float[Tensor, "positions heads 1 dim"]:
    """Return a layer's keys of the same token at several positions, each in a separate sequence.

    Because each key is computed from the same token alone, the keys differ only by their positions.
    """
    count = min(_POSITIONS, target.spec.max_position)
    positions = torch.arange(count, device=target.device)[:, None]
    zeros = torch.zeros_like(positions)
    token_ids = torch.full_like(positions, target.spec.vocab_size // 2)
    step = StepInput(token_ids, positions, zeros, zeros[:, 0], highest_slot=0)
    cache = target.new_cache(count, 1)
    target.forward(step, cache)
    return cache.slot_layers[layer].keys[:, :, :1].float()


def _differ(keys: Tensor, others: Tensor) -> bool:
    return bool((keys - others).abs().mean() > _TOLERANCE * others.abs().mean())


class LayerAttention(NamedTuple):
    """Weights of a layer's attention, converted to the conventions of `moa`.

    The channels of a rotary pair are half a head apart, and scores are divided by sqrt(head_dim).

    Attributes:
        key: matrix of the key heads, one after the other.
        value: matrix of the value heads, one after the other.
        bias: bias of queries, keys and values, in this order; zeros where a layer has none.
        head_gains: gains of the norms of each query and of each key; None if the layer has no such
            norms, or norms over all heads together.
    """

    query: Float[Tensor, "queries hidden"]
    key: Float[Tensor, "kv hidden"]
    value: Float[Tensor, "kv hidden"]
    output: Float[Tensor, "hidden queries"]
    gain: Float[Tensor, " hidden"]
    bias: Float[Tensor, " projected"]
    output_bias: Float[Tensor, " hidden"]
    head_gains: tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]] | None


@torch.no_grad()
def read_attention(target: TargetAdapter, index: int, heads: AttentionShape) -> LayerAttention:
    number = _number(target, index)
    layer = layers_of(target)[number]
    attention = _attention_in(layer, number)
    query, key, value, output = (matrix_of(getattr(attention, name)) for name in _PROJECTIONS)
    biases = (_bias_of(getattr(attention, name)) for name in _PROJECTIONS)
    query_bias, key_bias, value_bias, output_bias = biases
    _check_heads(target, number, heads, (query, key, value, output))
    are_adjacent = is_interleaved(target, number)
    if are_adjacent is None:
        raise _unusable(number, "keys that are rotated over the whole head")
    if are_adjacent:
        query, key = (_rows_in_halves(part, heads.head_dim) for part in (query, key))
        query_bias, key_bias = (
            _rows_in_halves(part[:, None], heads.head_dim)[:, 0] for part in (query_bias, key_bias)
        )
    norm = next((getattr(layer, name) for name in _NORMS if hasattr(layer, name)), None)
    factor = _score_factor(attention, heads.head_dim)
    gains = _head_gains(attention, query.new_empty(1, heads.head_dim), are_adjacent)
    return LayerAttention(
        query=query * factor,
        key=key,
        value=value,
        output=output * residual_factor_of(layer),
        gain=gain_of(norm, query),
        bias=torch.cat((query_bias * factor, key_bias, value_bias)),
        output_bias=output_bias * residual_factor_of(layer),
        head_gains=None if gains is None else (gains[0] * factor, gains[1]),
    )


def _number(target: TargetAdapter, index: int) -> int:
    count = int(target.config.num_hidden_layers)
    if not -count <= index < count:
        raise ConfigError(
            "initialize.attention_layer names a layer that the target does not have",
            expected=f"an index from {-count} to {count - 1}",
            got=index,
        )
    number = index % count
    if number >= target.spec.num_layers:
        raise _unusable(number, "a layer that reads no keys and values of another layer")
    return number


def layers_of(target: TargetAdapter) -> nn.ModuleList:
    count = int(target.config.num_hidden_layers)
    parts = target.model.get_decoder().modules()
    return next(part for part in parts if isinstance(part, nn.ModuleList) and len(part) == count)


def residual_factor_of(layer: nn.Module) -> float:
    """Return the factor by which a layer's outputs are scaled before the residual addition."""
    return float(getattr(layer, "residual_multiplier", 1.0))


def _attention_in(layer: nn.Module, number: int) -> nn.Module:
    for part in layer.modules():
        if have_matrices(part, _PROJECTIONS):
            return part
    raise _unusable(number, "four matrices " + ", ".join(_PROJECTIONS))


def _check_heads(
    target: TargetAdapter, number: int, trunk: AttentionShape, matrices: tuple[Tensor, ...]
) -> None:
    """Raise an error if the matrices have unusable shapes, or the trunk has different heads."""
    shape, hidden = target.spec.head_shapes[number], target.spec.hidden_size
    query_width, kv_width = matrices[-1].shape[-1], shape.num_kv_heads * shape.key_dim
    expected = [(query_width, hidden), *[(kv_width, hidden)] * 2, (hidden, query_width)]
    are_floats = all(matrix.dtype in FLOATS for matrix in matrices)
    if not are_floats or [tuple(matrix.shape) for matrix in matrices] != expected:
        raise _unusable(number, "floating-point matrices that fit the keys and values in the cache")
    wanted = {
        "num_heads": query_width // shape.key_dim,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.key_dim,
    }
    heads = trunk.model_dump(include=set(wanted))
    if heads != wanted:
        raise ConfigError(
            f"the heads of drafter.trunk differ in number or size from those of layer {number} "
            "of the target",
            expected=wanted,
            got=heads,
            remedy="set the expected values in drafter.trunk, or set initialize.attention_layer "
            "to null",
        )


def _rows_in_halves(matrix: Tensor, head_dim: int) -> Tensor:
    heads = matrix.unflatten(0, (-1, head_dim)).transpose(1, 2)
    return in_halves(heads).transpose(1, 2).flatten(0, 1)


def _head_gains(
    attention: nn.Module, like: Float[Tensor, "1 dim"], are_adjacent: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the gains of the norms of queries and of keys; None if no norm is that of a head."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(
        getattr(getattr(norm, "weight", None), "shape", None) != like[0].shape for norm in norms
    ):
        return None
    query, key = (gain_of(norm, like) for norm in norms)
    return (in_halves(query), in_halves(key)) if are_adjacent else (query, key)


def _bias_of(linear: nn.Module) -> Tensor:
    base: Any = linear.get_base_layer() if isinstance(linear, BaseTunerLayer) else linear
    weight, bias = base.weight, getattr(base, "bias", None)
    if isinstance(bias, Tensor):
        return bias
    dtype = weight.dtype if weight.dtype in FLOATS else torch.float32
    return torch.zeros(len(weight), dtype=dtype, device=weight.device)


def _score_factor(attention: nn.Module, head_dim: int) -> float:
    """Return the factor for queries that yields the layer's scores after division by sqrt(dim)."""
    usual = float(head_dim**-0.5)
    return float(getattr(attention, "scaling", usual)) / usual


def _unusable(number: int, expected: str) -> ConfigError:
    return ConfigError(
        f"the trunk's attention cannot be initialized from layer {number} of the target",
        expected=expected,
        remedy="set initialize.attention_layer to another layer or to null",
    )


class LayerFeedForward(NamedTuple):
    """Weights of `down(silu(gate(n)) * up(n))`; n is the normalized stream after attention."""

    gate: Float[Tensor, "units hidden"]
    up: Float[Tensor, "units hidden"]
    down: Float[Tensor, "hidden units"]
    gain: Float[Tensor, " hidden"]
    module: nn.Module


@torch.no_grad()
def read_feed_forward(target: TargetAdapter, index: int) -> LayerFeedForward | None:
    """Return a layer's feed-forward weights; None if experts cannot use them."""
    layer = layers_of(target)[index]
    part = getattr(layer, "mlp", None)
    norm = getattr(layer, "post_attention_layernorm", None)
    if norm is None or any(hasattr(layer, name) for name in _FURTHER_NORMS):
        return None
    if part is None or not have_matrices(part, _FEED_FORWARD_PROJECTIONS):
        return None
    if getattr(target.config, "hidden_act", None) not in _GATES:
        return None
    gate, up, down = (matrix_of(getattr(part, name)) for name in _FEED_FORWARD_PROJECTIONS)
    hidden = target.spec.hidden_size
    shapes = [tuple(matrix.shape) for matrix in (gate, up, down.T)]
    are_floats = all(matrix.dtype in FLOATS for matrix in (gate, up, down))
    if not are_floats or shapes != [(len(gate), hidden)] * 3:
        return None
    return LayerFeedForward(
        gate=gate,
        up=up,
        down=down * residual_factor_of(layer),
        gain=gain_of(norm, gate),
        module=part.down_proj,
    )
