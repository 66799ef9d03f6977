"""What a drafter reads of the target's inner state, and where it comes from."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jakiro.cache import SlotCache, StateSource


class TargetState(NamedTuple):
    """Raw state of some tokens, layer by layer; None where a drafter reads none."""

    memory: Float[Tensor, "batch tokens layers width"] | None
    features: Float[Tensor, "batch tokens states hidden"] | None

    def to(self, dtype: torch.dtype) -> "TargetState":
        """Return the state in another dtype."""
        return TargetState(*(None if part is None else part.to(dtype) for part in self))


class StateSources(NamedTuple):
    """What memory is made of, and what the features that a drafter reads are made of."""

    memory: StateSource | None
    features: StateSource | None

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """The hidden states that a cache must keep, ascending."""
        several = [source.hidden_states for source in self if source is not None]
        return tuple(sorted({state for states in several for state in states}))

    def read(self, cache: SlotCache, slots: Int[Tensor, "batch rows"]) -> TargetState:
        """Return the state of the tokens at some slots of a cache that keeps `hidden_states`."""
        return TargetState(*(None if one is None else cache.state(slots, one) for one in self))
