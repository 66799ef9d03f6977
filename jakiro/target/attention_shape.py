"""Geometry of a target's attention, which the drafter inherits or depends on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from jakiro.utils.settings import Settings

_USUAL_HEAD_DIM = 64
_USUAL_BASE = 10_000.0


class HeadShape(NamedTuple):
    """Geometry of one layer's keys and values; keys and values may differ in size."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class AttentionShape(Settings):
    """Geometry of a grouped-query attention module with a rotary embedding.

    Attributes:
        num_kv_heads: number of key/value heads, a divisor of `num_heads`.
    """

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    rope_theta: float = Field(gt=0)


class KeyRotation(Settings):
    """Rotation of whole keys that pairs their two halves (see `moa.layers.Rotary`).

    Attributes:
        frequencies: angle per position of each pair of channels.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


def attention_shape_of(config: Any, last: HeadShape, hidden_size: int) -> AttentionShape:
    """Return the geometry of a target's last layer, to be used in a trunk.

    If a trunk cannot have this geometry, it has as many heads of size 64 as fit into the hidden
    size.
    """
    heads: Any = getattr(config, "num_attention_heads", None)
    is_usable = isinstance(heads, int) and heads % last.num_kv_heads == 0
    if not is_usable or last.key_dim != last.value_dim or last.key_dim % 2:
        count = max(1, hidden_size // _USUAL_HEAD_DIM)
        sizes, base = (count, count, _USUAL_HEAD_DIM), _USUAL_BASE
    else:
        sizes, base = (heads, last.num_kv_heads, last.key_dim), _rope_base(config)
    return AttentionShape(
        num_heads=sizes[0], num_kv_heads=sizes[1], head_dim=sizes[2], rope_theta=base
    )


def _rope_base(config: Any) -> float:
    """Return the rotary base of the last layer, or the usual base if the config has no base."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    if kinds and isinstance(parameters.get(kinds[-1]), Mapping):  # parameters per kind of layer
        parameters = parameters[kinds[-1]]
    return float(parameters.get("rope_theta") or _USUAL_BASE)
