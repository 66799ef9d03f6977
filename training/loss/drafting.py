"""The drafter at every position of a packed batch, as it will be when it drafts there."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput
from jakiro.target.masks import same_document
from jakiro.target.tail import JoinedCache, TargetTail
from moa.attention import KV, KVStore
from moa.trunk import TrunkInputs
from training.loss.batch import Batch
from training.loss.views import TargetView


class _Halves(NamedTuple):
    """The two halves of a drafter, with or without keeping their activations for backward."""

    encode_memory: Callable[..., tuple[Tensor, ...]]
    draft: Callable[..., ExpertsOutput]

    @classmethod
    def of(cls, drafter: JakiroDrafter, recompute: bool) -> "_Halves":
        if not recompute:
            return cls(drafter.encode_memory, drafter)
        # Nothing in a drafter is drawn, so there is no random state to bring back.
        again: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return cls(partial(again, drafter.encode_memory), partial(again, drafter))


def draft_all_positions(
    drafter: JakiroDrafter,
    view: TargetView,
    batch: Batch,
    tail: TargetTail | None = None,
    recompute: bool = False,
) -> Iterator[ExpertsOutput]:
    """Yield the drafter's output at every position, once per draw of anchors.

    Position i sees tokens up to i and what is verified up to its anchor, both of its own document
    only. What the target's state is encoded to is shared by all draws.

    Args:
        drafter: at work.
        view: of the target, with `tail_rows` if there is a tail.
        batch: the packed rows.
        tail: the target's last layers, if the drafter's output goes through them.
        recompute: whether backward computes the drafter's activations again instead of keeping
            them; gradients are the same.
    """
    halves = _Halves.of(drafter, recompute)
    if drafter.trunk.feature_input is None:
        return _from_memory(drafter, halves, view, batch, tail)
    return _rolled_out(drafter, halves, view, batch, tail)


def _from_memory(
    drafter: JakiroDrafter, halves: _Halves, view: TargetView, batch: Batch, tail: TargetTail | None
) -> Iterator[ExpertsOutput]:
    """Draft each draw's positions, all at once: they do not depend on each other."""
    kept = halves.encode_memory(view.state, batch.positions)
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    causal = same_document(batch.documents) & (index <= index[:, None])
    for draw in range(batch.anchors.shape[1]):
        recent = causal & ((index > batch.anchors[:, draw, :, None]) | (index == index[:, None]))
        own = torch.where(batch.is_narrow[:, None, None], recent, causal).unsqueeze(1)
        evidence = _memory(drafter, kept, batch, draw)
        output = halves.draft(view.embeddings, batch.positions, own, evidence)
        yield output if tail is None else through_tail(output, tail, view, batch, draw)


def _rolled_out(
    drafter: JakiroDrafter, halves: _Halves, view: TargetView, batch: Batch, tail: TargetTail | None
) -> Iterator[ExpertsOutput]:
    """Draft distance 1 from the target's features, then each next one from the drafter's own.

    This is the training-time test of EAGLE-3 (arXiv 2503.01840). At distance k, position i sees the
    rows of the first pass up to i - k + 1, whose features are the target's, and then one row of
    each pass: that of pass m at i - k + m.

        distance      rows seen by position i
        1             first pass: ..., i
        2             first pass: ..., i - 1; second: i
        3             first pass: ..., i - 2; second: i - 1; third: i
    """
    kept = halves.encode_memory(view.state, batch.positions)
    previous = _shifted(kept[-1].squeeze(1), batch)
    rows = _EarlierKV()
    predicted = None if tail is None else JoinedCache(view.tail_kv, tail.input_state)
    for draw in range(batch.anchors.shape[1]):
        mask = _rollout_mask(batch, num_passes=draw + 1).unsqueeze(1)
        evidence = _memory(drafter, kept, batch, draw)._replace(previous=previous)
        store = rows.of_pass(draw)
        output = halves.draft(view.embeddings, batch.positions, mask, evidence, store)
        if tail is not None and predicted is not None:
            output = _rolled_through_tail(output, tail, batch, draw, predicted)
        yield output
        previous = _shifted(output.mean_feature, batch)


def _memory(
    drafter: JakiroDrafter, kept: tuple[Tensor, ...], batch: Batch, draw: int
) -> TrunkInputs:
    """Return the memory that each position sees: up to its anchor."""
    if drafter.trunk.cross_attention is None:
        return TrunkInputs()
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    verified = same_document(batch.documents) & (index <= batch.anchors[:, draw, :, None])
    return TrunkInputs(memory=KV(*kept[:2]), mask=verified.unsqueeze(1))


class _EarlierKV:
    """Shows the rows of all passes, one after the other, also to a pass that is computed again."""

    def __init__(self) -> None:
        self._up_to: list[KV] = []

    def of_pass(self, number: int) -> KVStore:
        """Return the store of a pass, counted from zero, which sees those before it."""
        earlier = self._up_to[number - 1] if number else None

        def join(rows: KV) -> KV:
            if earlier is not None:
                pairs = zip(earlier, rows, strict=True)
                rows = KV(*(torch.cat(pair, dim=2) for pair in pairs))
            if len(self._up_to) == number:
                self._up_to.append(rows)
            return rows

        return join


def _rollout_mask(batch: Batch, num_passes: int) -> Bool[Tensor, "batch rows keys"]:
    """Return which rows of `num_passes` passes each position sees in the last of them."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    same = same_document(batch.documents)
    first = same & (index[:, None] - index >= num_passes - 1)
    return torch.cat([first, *_own_passes(batch, num_passes)[1:]], dim=2)


def _own_passes(batch: Batch, num_passes: int) -> list[Bool[Tensor, "batch rows rows"]]:
    """Return for each pass which of its rows lie on a position's own way in the last pass."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    behind = index[:, None] - index  # how far a row lies behind the query
    same = same_document(batch.documents)
    return [same & (behind == num_passes - one) for one in range(1, num_passes + 1)]


def _shifted(
    features: Float[Tensor, "batch rows hidden"], batch: Batch
) -> Float[Tensor, "batch rows hidden"]:
    """Return the feature of the position before each; zeros at the start of a document."""
    before = features.roll(1, dims=1)
    return torch.where(batch.positions[:, :, None] > 0, before, 0.0)


def through_tail(
    output: ExpertsOutput, tail: TargetTail, view: TargetView, batch: Batch, draw: int
) -> ExpertsOutput:
    """Return an output whose features went through the target's last layers.

    A predicted state sees the target's own rows up to its anchor, and predicted ones from there on.
    Positions between an anchor and one that uses it must use it, too.

    Args:
        output: of combine "sum" without parallel levels.
        tail: the layers.
        view: with `tail_rows`.
        batch: the packed rows.
        draw: which of the batch's anchors the output was made with.
    """
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    same = same_document(batch.documents)
    anchors = batch.anchors[:, draw, :, None]
    predicted = same & (index > anchors) & (index <= index[:, None])
    rows = JoinedCache(view.tail_kv, tail.input_state)
    return _with_tail_output(output, tail, batch, [same & (index <= anchors), predicted], rows)


def _rolled_through_tail(
    output: ExpertsOutput, tail: TargetTail, batch: Batch, draw: int, rows: JoinedCache
) -> ExpertsOutput:
    """Return the output of a rollout's step behind the tail, whose rows are those of all steps."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    verified = same_document(batch.documents) & (index <= batch.anchors[:, draw, :, None])
    return _with_tail_output(output, tail, batch, [verified, *_own_passes(batch, draw + 1)], rows)


def _with_tail_output(
    output: ExpertsOutput, tail: TargetTail, batch: Batch, visible: list[Tensor], rows: JoinedCache
) -> ExpertsOutput:
    positions = batch.positions
    seen_positions = positions.repeat(1, len(visible))
    seen = torch.cat(visible, dim=2)
    return output.with_tail_output(
        tail.forward(output.mean_feature, positions, seen, seen_positions, rows)
    )
