"""One forward pass of the frozen target over a packed batch, and the outputs that drafters read."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache, StateSource, StateSources, TargetState
from jakiro.target.step import StepInput, StepOutput
from jakiro.target.tail import TailKV, TargetTail
from training.loss.batch import Batch
from training.loss.normalizers import Normalizers


class TargetView(NamedTuple):
    """Outputs of the frozen target for a batch.

    Attributes:
        tail_kv: keys and values of the tail layers; empty if there are no tail layers.
        normalizers: normalizers of the target's distributions at temperature 1; None if they are
            not known.
    """

    features: Float[Tensor, "batch length hidden"]
    state: TargetState
    embeddings: Float[Tensor, "batch length hidden"]
    tail_input: Float[Tensor, "batch length hidden"] | None = None
    tail_kv: TailKV = ()
    normalizers: Normalizers | None = None

    def to(self, dtype: torch.dtype) -> "TargetView":
        """Return the view in `dtype`; normalizers and states of tail layers keep their dtypes."""
        return self._replace(
            features=self.features.to(dtype),
            state=self.state.to(dtype),
            embeddings=self.embeddings.to(dtype),
            tail_input=None if self.tail_input is None else self.tail_input.to(dtype),
        )


@torch.no_grad()  # outputs of `inference_mode` could not be used in a backward pass
def look_at_target(
    target: TargetAdapter,
    batch: Batch,
    sources: StateSources,
    cache: SlotCache,
    tail: TargetTail | None = None,
) -> TargetView:
    """Run the target over the packed sequences and return its features and per-layer state.

    Args:
        cache: cache for all sequences of the batch. It must keep the hidden states that
            `states_kept` lists; its content is overwritten.
    """
    output = read_batch(target, batch, cache)
    slots = output.step.slots
    state = sources.read(cache, slots)
    view = TargetView(output.features, state, target.embed(batch.token_ids))
    if tail is None:
        return view
    tail_input = cache.state(slots, StateSource("hidden", (tail.input_state,)))[:, :, 0]
    return view._replace(tail_input=tail_input, tail_kv=tail.kv(cache, slots))


def read_batch(target: TargetAdapter, batch: Batch, cache: SlotCache) -> StepOutput:
    """Run the target over the packed sequences; the content of the cache is overwritten."""
    slots = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    step = StepInput(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=slots.expand_as(batch.token_ids),
        lengths=torch.zeros_like(batch.token_ids[:, 0]),
        highest_slot=batch.token_ids.shape[1] - 1,
        documents=batch.documents,
    )
    return target.forward(step, cache)


def states_kept(sources: StateSources, tail: TargetTail | None) -> tuple[int, ...]:
    """Return the indices of the hidden states that a cache must keep for `look_at_target`."""
    wanted = {*sources.hidden_states, *(() if tail is None else (tail.input_state,))}
    return tuple(sorted(wanted))
