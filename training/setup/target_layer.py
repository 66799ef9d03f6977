"""One attention layer of a target, read in the form that this project's attention has."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from jakiro.errors import ConfigError
from jakiro.target.adapter import StepInput, TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from moa.rotary import Rotary

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def have_matrices(owner: object, names: Collection[str]) -> bool:
    """Return whether linear layers of these names are there, each with a weight to be read."""
    parts = (getattr(owner, name, None) for name in names)
    return all(isinstance(getattr(part, "weight", None), Tensor) for part in parts)


def matrix_of(linear: nn.Module) -> Tensor:
    """Return the matrix that a linear layer multiplies by, with that of its adapters (PEFT).

    Where it keeps no plain matrix [out, in], as when it is quantised, its weight as it is kept.
    """
    weight: Tensor = linear.weight  # type: ignore[assignment]
    if not isinstance(linear, BaseTunerLayer) or weight.dtype not in FLOATS:
        return weight
    units = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    with _without_bias(linear.get_base_layer()):  # which half precision would round the matrix to
        return (linear(units) - linear(torch.zeros_like(units[:1]))).T


def gain_of(norm: nn.Module | None, like: Float[Tensor, "_ hidden"]) -> Float[Tensor, " hidden"]:
    """Return what a norm multiplies each channel by, however it keeps that; 1 without a norm.

    Args:
        norm: RMS or layer norm over the last axis.
        like: whose last axis, dtype and device it has.
    """
    count = like.shape[1]
    if norm is None:
        return like.new_ones(count)
    # Of mean 0 and mean square 2^12, which no epsilon changes in float32 and whose root is exact.
    signs = 1.0 - 2.0 * (torch.arange(count, device=like.device) % 2).to(like.dtype)
    return (norm(64 * signs) - norm(-64 * signs)) / 2 * signs


@contextmanager
def _without_bias(linear: Any) -> Iterator[None]:
    bias = linear.bias
    linear.bias = None
    try:
        yield
    finally:
        linear.bias = bias


def left_behind_by(
    part: nn.Module, linears: Collection[str], norm: nn.Module | None
) -> tuple[str, ...]:
    """Return the names of parameters that neither `matrix_of` nor `gain_of` read.

    Args:
        part: of a layer, in which the linear layers are.
        linears: their names, of which the matrices were read.
        norm: before that part; of which the gain was read.
    """
    # PEFT puts a layer with adapters below one that has them.
    names = [name.replace("base_layer.", "") for name, _ in part.named_parameters()]
    own = [name for name in names if name.split(".")[0] not in linears or name.endswith(".bias")]
    of_norm = [] if norm is None else [name for name, _ in norm.named_parameters()]
    return (*own, *(f"norm.{name}" for name in of_norm if name != "weight"))


_POSITIONS = 8  # at which keys are looked at
_TOLERANCE = 0.02  # of their mean size, above the rounding of half precision

Keys = Float[Tensor, "positions heads 1 dim"]


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding of whole heads.

    Attributes:
        is_interleaved: whether pairs that are rotated stand side by side, not half a head apart.
        keys: what was seen, of one token at positions 0, 1, ..., pairs half a head apart.
    """

    is_interleaved: bool
    keys: Keys

    def has_base(self, base: float) -> bool:
        """Return whether the keys turn as with this wavelength base."""
        positions = torch.arange(len(self.keys), device=self.keys.device)[:, None]
        first = self.keys[:1].repeat(len(self.keys), 1, 1, 1)
        return not _differ(Rotary(self.keys.shape[-1], base)(first, positions), self.keys)


@torch.no_grad()
def rotation_of(target: TargetAdapter, layer: int) -> Rotation | None:
    """Return how a layer rotates its keys; None if it does not.

    Where pairs half a head apart turn only in a part of the head, that is None, too. Where pairs
    stand side by side, those that stay as they are look like slow ones; `has_base` tells.
    """
    keys = _keys_of_one_token(target, layer)
    if not _differ(keys[:1], keys):
        return None
    for is_interleaved in (False, True):
        halves = in_halves(keys) if is_interleaved else keys
        lengths = torch.hypot(*halves.chunk(2, dim=-1))  # of pairs, which rotating does not change
        if not _differ(lengths[:1], lengths):
            return Rotation(is_interleaved, halves)
    return None


def in_halves(heads: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Bring pairs that stand side by side half a head apart."""
    return torch.cat((heads[..., ::2], heads[..., 1::2]), dim=-1)


def _keys_of_one_token(target: TargetAdapter, layer: int) -> Keys:
    """Return a layer's keys of one token at several positions, alone at each.

    They come from the same vectors, so nothing but the positions tells them apart.
    """
    count = min(_POSITIONS, target.spec.max_position)
    places = torch.arange(count, device=target.device)[:, None]
    nothing = torch.zeros_like(places)
    token_ids = torch.full_like(places, target.spec.vocab_size // 2)
    step = StepInput(token_ids, places, nothing, nothing[:, 0], highest_slot=0)
    cache = target.new_cache(count, 1)
    target.forward(step, cache)
    return cache.slot_layers[layer].keys[:, :, :1].float()


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().mean() > _TOLERANCE * other.abs().mean())


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("input_layernorm", "attention_layernorm")  # absent where attention reads the stream as is


class LayerAttention(NamedTuple):
    """Weights of a layer's attention; heads are rotated in halves, scores divided by sqrt(dim).

    Attributes:
        query: of the query heads, one after the other.
        key: likewise.
        value: likewise.
        output: of the heads' results, to what is added to the stream.
        gain: of the norm before attention; ones where there is none.
        left_behind: names of parameters for which `moa` has no place: biases, norms of heads, ...
        has_same_base: whether the layer rotates as the trunk's settings say.
    """

    query: Float[Tensor, "queries hidden"]
    key: Float[Tensor, "kv hidden"]
    value: Float[Tensor, "kv hidden"]
    output: Float[Tensor, "hidden queries"]
    gain: Float[Tensor, " hidden"]
    left_behind: tuple[str, ...]
    has_same_base: bool


@torch.no_grad()
def read_attention(target: TargetAdapter, index: int, heads: AttentionShape) -> LayerAttention:
    """Return the attention weights of a layer of the target, as views of it where possible.

    Args:
        target: the frozen target.
        index: of the layer; negative from the end.
        heads: of the trunk that the weights are for.

    Raises:
        ConfigError: there is no such layer, its weights are not four plain matrices, its heads are
            not the trunk's, or it does not place its keys by rotating them.
    """
    number = _number(target, index)
    layer = layers_of(target)[number]
    attention = _attention_in(layer, number)
    query, key, value, output = (matrix_of(getattr(attention, name)) for name in _PROJECTIONS)
    _check_heads(target, number, heads, (query, key, value, output))
    rotation = _rotation_of(target, number)
    if rotation.is_interleaved:
        query, key = (_rows_in_halves(part, heads.head_dim) for part in (query, key))
    norm = next((getattr(layer, name) for name in _NORMS if hasattr(layer, name)), None)
    return LayerAttention(
        query=query * _score_factor(attention, heads.head_dim),
        key=key,
        value=value,
        output=output * residual_factor_of(layer),
        gain=gain_of(norm, query),
        left_behind=left_behind_by(attention, _PROJECTIONS, norm),
        has_same_base=rotation.has_base(heads.rope_theta),
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
        raise ConfigError(
            f"layer {number} of the target reads the keys and values of another one",
            expected=f"a layer before {target.spec.num_layers}",
            got=index,
            remedy="choose another initialize.attention_layer, or null",
        )
    return number


def layers_of(target: TargetAdapter) -> nn.ModuleList:
    """Return the target's layers."""
    count = int(target.config.num_hidden_layers)
    parts = target.model.get_decoder().modules()
    return next(part for part in parts if isinstance(part, nn.ModuleList) and len(part) == count)


def residual_factor_of(layer: nn.Module) -> float:
    """Return what a layer multiplies its parts' outputs by before it adds them to the stream."""
    return float(getattr(layer, "residual_multiplier", 1.0))


def _attention_in(layer: nn.Module, number: int) -> nn.Module:
    for part in layer.modules():
        if have_matrices(part, _PROJECTIONS):
            return part
    names = [name for name, part in layer.named_modules() if hasattr(part, "weight")]
    got = f"{type(layer).__name__} with {', '.join(names[:6])}, ..."
    raise _unusable(number, "four matrices " + ", ".join(_PROJECTIONS), got)


def _check_heads(
    target: TargetAdapter, number: int, trunk: AttentionShape, matrices: tuple[Tensor, ...]
) -> None:
    """Refuse matrices that are not those of heads like the trunk's."""
    shape = target.spec.head_shapes[number]
    dim, kv_rows = shape.key_dim, shape.num_kv_heads * shape.key_dim
    hidden, rows = target.spec.hidden_size, matrices[-1].shape[-1]
    expected = [(rows, hidden), (kv_rows, hidden), (kv_rows, hidden), (hidden, rows)]
    are_floats = all(one.dtype in FLOATS for one in matrices)
    if not are_floats or [tuple(one.shape) for one in matrices] != expected:
        got = ", ".join(f"{tuple(one.shape)} of {one.dtype}" for one in matrices)
        raise _unusable(number, "plain matrices of keys and values as the cache keeps them", got)
    wanted = {"num_heads": rows // dim, "num_kv_heads": shape.num_kv_heads, "head_dim": dim}
    got_heads = trunk.model_dump(include=set(wanted))
    if got_heads != wanted:
        raise ConfigError(
            f"drafter.trunk has other heads than layer {number} of the target",
            expected=_listed(wanted),
            got=_listed(got_heads),
            remedy="set drafter.trunk to these, or initialize.attention_layer to null",
        )


def _rotation_of(target: TargetAdapter, number: int) -> Rotation:
    rotation = rotation_of(target, number)
    if rotation is None:
        raise _unusable(
            number,
            "keys that are rotated by their position, over the whole head",
            "another kind of position, rotation of a part, or none",
        )
    return rotation


def _rows_in_halves(matrix: Tensor, head_dim: int) -> Tensor:
    heads = matrix.unflatten(0, (-1, head_dim)).transpose(1, 2)
    return in_halves(heads).transpose(1, 2).flatten(0, 1)


def _score_factor(attention: nn.Module, head_dim: int) -> float:
    """Return what queries are to be multiplied by, for scores that are divided by sqrt(dim)."""
    usual = float(head_dim**-0.5)
    return float(getattr(attention, "scaling", usual)) / usual


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _unusable(number: int, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"attention cannot start from layer {number} of the target",
        expected=expected,
        got=got,
        remedy="choose another initialize.attention_layer, or null",
    )


_FEED_FORWARD_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
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
    if part is None or not have_matrices(part, _FEED_FORWARD_PROJECTIONS):
        return None
    if getattr(target.config, "hidden_act", None) not in _GATES:
        return None
    gate, up, down = (matrix_of(getattr(part, name)) for name in _FEED_FORWARD_PROJECTIONS)
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
        left_behind=left_behind_by(part, _FEED_FORWARD_PROJECTIONS, norm),
        module=part.down_proj,
    )
