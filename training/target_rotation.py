"""How a layer of a target rotates its keys, seen from the keys themselves, for any family."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from jakiro.target import StepInput, TargetAdapter
from moa.rotary import Rotary

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
