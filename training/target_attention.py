"""One attention layer of a target, read in the form that this project's attention has."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.attention_shape import AttentionShape
from jakiro.errors import ConfigError
from jakiro.target import TargetAdapter
from training.target_matrix import FLOATS, gain_of, have_matrices, left_behind_by, matrix_of
from training.target_rotation import Rotation, in_halves, rotation_of

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
        has_same_base=rotation.has_base(heads.rope_base),
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
