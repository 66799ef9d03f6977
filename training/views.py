"""One pass of the frozen target and of the drafter over a packed batch."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from jakiro.cache import SlotCache, StateSource
from jakiro.drafter import JakiroDrafter
from jakiro.experts import BankOutput
from jakiro.masks import same_document
from jakiro.target import StepInput, TargetAdapter
from moa.rows import Rows
from training.batch import Batch


class TargetView(NamedTuple):
    """What the frozen target says of a batch."""

    features: Float[Tensor, "batch rows hidden"]
    state: Float[Tensor, "batch rows layers width"]
    embeddings: Float[Tensor, "batch rows hidden"]


@torch.no_grad()  # not inference_mode: these tensors are saved for the drafter's backward
def look_at_target(
    target: TargetAdapter, batch: Batch, source: StateSource, cache: SlotCache
) -> TargetView:
    """Run the target over the packed rows and read features and per-layer state.

    Args:
        target: the frozen target.
        batch: rows of at most `cache.capacity` tokens.
        source: the drafter's `state_source`.
        cache: a cache of the batch's size that keeps its hidden states; it is overwritten.
    """
    slots = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    step = StepInput(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=slots.expand_as(batch.token_ids),
        lengths=torch.zeros_like(batch.token_ids[:, 0]),
        highest_slot=batch.token_ids.shape[1] - 1,
        documents=batch.documents,
    )
    features = target.forward(step, cache).features
    return TargetView(features, cache.state(step.slots, source), target.embed(batch.token_ids))


def draft_all_positions(
    drafter: JakiroDrafter, view: TargetView, batch: Batch
) -> Iterator[BankOutput]:
    """Yield the drafter's output at every position, once per draw of anchors.

    Position i sees tokens up to i and memory up to its anchor, both of its own document only. The
    memory is encoded once and shared by all draws.
    """
    rows = drafter.remember(view.state, batch.positions)
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    same = same_document(batch.documents)
    causal = same & (index <= index[:, None])
    for draw in range(batch.anchors.shape[1]):
        verified = same & (index <= batch.anchors[:, draw, :, None])
        yield _draft(drafter, view, batch, causal, rows, verified)


def _draft(
    drafter: JakiroDrafter,
    view: TargetView,
    batch: Batch,
    causal: Tensor,
    rows: Rows,
    verified: Tensor,
) -> BankOutput:
    masks = causal.unsqueeze(1), verified.unsqueeze(1)
    output: BankOutput = drafter(view.embeddings, batch.positions, masks[0], rows, masks[1])
    return output
