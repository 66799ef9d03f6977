"""The rotation of cached keys by their positions, if it is the same in all layers of a target."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from jakiro.target.attention_shape import HeadShape
from jakiro.utils.settings import Settings

_OFFSET = 5  # distance between the positions at which the keys of the same tokens are compared


class KeyRotation(Settings):
    """Rotation of whole keys that pairs their two halves (see `moa.rotary.Rotary`).

    Attributes:
        frequencies: angle per position of each pair of channels.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


def measured_rotation(
    decoder: nn.Module, shapes: Sequence[HeadShape], keys_at: Callable[[int], list[Tensor]]
) -> KeyRotation | None:
    """Return the rotation of a target's keys; None unless it is the same in all layers.

    If a text is moved by some positions, the hidden states of a target with rotary embeddings stay
    the same, and each key is rotated by the distance. This is measured in all layers.

    Args:
        keys_at: function that returns the keys [1, heads, tokens, dim] of each layer for a text
            that begins at the given position.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    scale = getattr(rotary, "attention_scaling", 1.0)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, int | float):
        return None
    width = 2 * len(frequencies)
    if len(set(shapes)) > 1 or (shapes[0].key_dim, shapes[0].value_dim) != (width, width):
        return None
    if frequencies.is_meta:  # a target without values, whose memory is estimated
        return KeyRotation(frequencies=(1.0,) * len(frequencies), scale=float(scale))
    angles = (_OFFSET * frequencies.float()).to(torch.float32)
    cos, sin = angles.cos(), angles.sin()
    for start, moved in zip(keys_at(0), keys_at(_OFFSET), strict=True):
        first, second = start.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        tolerance = 1e-3 if start.dtype == torch.float32 else 5e-2
        if not (turned - moved.float()).abs().max() <= tolerance * turned.abs().max():
            return None
    return KeyRotation(frequencies=tuple(frequencies.float().tolist()), scale=float(scale))
