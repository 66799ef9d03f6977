"""The drafter's output at every position of a packed batch, computed as in decoding."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput
from jakiro.levels import PseudoRows, with_features
from jakiro.target.step import same_document
from jakiro.target.tail import JoinedCache, TargetTail
from moa.attention import KV, KVStore
from moa.trunk import TrunkInputs
from training.loss.batch import ROOTS_OF_A_GROUP, Batch, TargetView


class _Halves(NamedTuple):
    """A drafter's memory encoder and drafting pass, with activations either kept or recomputed."""

    encode_memory: Callable[..., tuple[Tensor, ...]]
    draft: Callable[..., ExpertsOutput]

    @classmethod
    def of(cls, drafter: JakiroDrafter, recompute: bool, autocast: bool) -> "_Halves":
        halves = cls(drafter.encode_memory, drafter)
        if autocast:
            halves = halves._in_bfloat16(drafter.device)
        if not recompute:
            return halves
        # A drafter uses no random numbers, so there is no random state to restore.
        again: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return cls(*(partial(again, half) for half in halves))

    def _in_bfloat16(self, device: torch.device) -> "_Halves":
        """Return the same functions with products in bfloat16, and outputs in float32."""
        autocast = partial(torch.autocast, device.type, torch.bfloat16)

        def encode(*arguments: Any) -> tuple[Tensor, ...]:
            with autocast():
                return self.encode_memory(*arguments)

        def draft(*arguments: Any, **named: Any) -> ExpertsOutput:
            with autocast():
                output = self.draft(*arguments, **named)
            features, log_weights, gate = (part.float() for part in output[:3])
            state = None if output.state is None else output.state.float()
            return ExpertsOutput(features, log_weights, gate, state, *output[4:])

        return _Halves(encode, draft)


def draft_all_positions(
    drafter: JakiroDrafter,
    view: TargetView,
    batch: Batch,
    tail: TargetTail | None = None,
    recompute: bool = False,
    knows_path: bool = True,
    autocast: bool = False,
) -> Iterator[ExpertsOutput]:
    """Yield the drafter's output at every position, once per anchor sample.

    An anchor sample is one choice of an anchor for every position. Position i attends to the tokens
    of its document up to i, and to the target's state up to the anchor of position i:

        index           0   1   2   3   4   5      position 4, whose anchor is 2
        tokens          x   x   x   x   x
        target state    x   x   x

    In narrow sequences (`Batch.is_narrow`), position i attends only to the tokens after its anchor.

    The target's state is encoded once for all anchor samples.

    Args:
        recompute: whether the backward pass recomputes the drafter's activations, so that they need
            not be kept; this does not change the gradients.
    """
    halves = _Halves.of(drafter, recompute, autocast)
    following = _following_embeddings(drafter, view.embeddings, batch) if knows_path else None
    if drafter.trunk.memory_norm is not None:
        return _draft_blocks(drafter, halves, view, batch, following)
    if drafter.trunk.feature_input is None:
        return _from_memory(drafter, halves, view, batch, following, tail)
    return _roll_out(drafter, halves, view, batch, following, tail)


def _following_embeddings(
    drafter: JakiroDrafter, embeddings: Float[Tensor, "batch length hidden"], batch: Batch
) -> Float[Tensor, "batch length parallel hidden"] | None:
    """Return the embeddings of the tokens after each position, if parallel levels read them.

    Those after the end of a document are zeros; levels that read them have no target.
    """
    if drafter.path_features is None:
        return None
    count = len(drafter.path_features.shifts)
    following = []
    for ahead in range(1, count + 1):
        is_later = batch.positions.roll(-ahead, dims=1) == batch.positions + ahead
        later = embeddings.roll(-ahead, dims=1)
        following.append(torch.where(is_later.unsqueeze(2), later, 0.0))
    return torch.stack(following, dim=2)


def _draft_blocks(
    drafter: JakiroDrafter,
    halves: _Halves,
    view: TargetView,
    batch: Batch,
    following: Tensor | None,
) -> Iterator[ExpertsOutput]:
    """Draft a block at each root; zeros elsewhere.

    A root and the masks behind it attend to each other and to memory up to the anchor. Roots of a
    sequence are drafted in groups, because attention takes time for the masks of its whole group.
    """
    encoded = halves.encode_memory(view.state, batch.positions)
    roots = batch.block_roots()
    group = ROOTS_OF_A_GROUP if roots.shape[1] % ROOTS_OF_A_GROUP == 0 else roots.shape[1]
    columns = roots.reshape(-1, group)
    groups = len(columns) // len(roots)
    sequence = torch.arange(len(roots), device=roots.device).repeat_interleave(groups)[:, None]
    inputs = _memory_inputs(drafter, encoded, batch, 0)
    assert inputs.mask is not None
    inputs = inputs._replace(
        memory=tuple(KV(*(part[sequence[:, 0]] for part in kv)) for kv in inputs.memory),
        mask=inputs.mask[sequence, 0, columns].unsqueeze(1),
    )
    if drafter.trunk.feature_input is not None:
        previous = _shift(encoded[-1].squeeze(1), batch)
        inputs = inputs._replace(previous=previous[sequence, columns])
    mask = torch.eye(group, dtype=torch.bool, device=roots.device)
    mask = mask.expand(len(columns), 1, -1, -1)
    at_roots = (part[sequence, columns] for part in (view.embeddings, batch.positions))
    known = None if following is None else following[sequence, columns]
    output = halves.draft(*at_roots, mask, inputs, following=known)
    yield output.scattered(sequence, columns, batch.token_ids.shape)


def _from_memory(
    drafter: JakiroDrafter,
    halves: _Halves,
    view: TargetView,
    batch: Batch,
    following: Tensor | None,
    tail: TargetTail | None,
) -> Iterator[ExpertsOutput]:
    """Draft all positions of an anchor sample in one pass, as they do not depend on each other."""
    encoded = halves.encode_memory(view.state, batch.positions)
    earlier_tokens = _earlier_embeddings(drafter, view.embeddings, batch)
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    causal = same_document(batch.documents) & (index <= index[:, None])
    for sample in range(batch.anchors.shape[1]):
        recent = causal & ((index > batch.anchors[:, sample, :, None]) | (index == index[:, None]))
        mask = torch.where(batch.is_narrow[:, None, None], recent, causal)
        mask = _own_mask(drafter, mask, batch)
        inputs = _memory_inputs(drafter, encoded, batch, sample)._replace(earlier=earlier_tokens)
        output = halves.draft(view.embeddings, batch.positions, mask, inputs, following=following)
        yield output if tail is None else through_tail(output, tail, view, batch, sample)


def _roll_out(
    drafter: JakiroDrafter,
    halves: _Halves,
    view: TargetView,
    batch: Batch,
    following: Tensor | None,
    tail: TargetTail | None,
) -> Iterator[ExpertsOutput]:
    """Draft at distance 1 from the target's features, and at longer ones from the drafter's own.

    This is the training-time test of EAGLE-3 (arXiv 2503.01840), with one pass for each distance.
    At distance k, position i attends to the keys and values of the first pass, which are computed
    from the target's features, up to position i - k + 1. In addition, it attends to one position of
    each later pass: position i - k + m of pass m.

        distance      keys and values that position i attends to
        1             first pass: ..., i
        2             first pass: ..., i - 1; second: i
        3             first pass: ..., i - 2; second: i - 1; third: i
    """
    encoded = halves.encode_memory(view.state, batch.positions)
    previous = _shift(encoded[-1].squeeze(1), batch)
    earlier_tokens = _earlier_embeddings(drafter, view.embeddings, batch)
    earlier = [_EarlierKV() for _ in drafter.trunk.kv_shapes]
    predicted = None if tail is None else JoinedCache(view.tail_kv, tail.input_state)
    for sample in range(batch.anchors.shape[1]):
        mask = _own_mask(drafter, _ttt_mask(batch, num_passes=sample + 1), batch)
        inputs = _memory_inputs(drafter, encoded, batch, sample)
        inputs = inputs._replace(previous=previous, earlier=earlier_tokens)
        stores = tuple(layer.of_pass(sample) for layer in earlier)
        output = halves.draft(
            view.embeddings, batch.positions, mask, inputs, stores, following=following
        )
        if tail is not None and drafter.transfers:
            output = _transfer(output, tail, view, batch, sample)
        elif tail is not None and predicted is not None:
            output = _roll_through_tail(output, tail, batch, sample, predicted)
        yield output
        previous = _shift(output.mean_feature, batch)


def _own_mask(
    drafter: JakiroDrafter, visible: Bool[Tensor, "batch length keys"], batch: Batch
) -> Bool[Tensor, "batch 1 length keys"]:
    """Return the mask of self-attention, which may exclude the first token of each document.

    In that case, the first token attends only to itself, because attention over no keys is not
    finite. Its output carries no loss, and no other position reads it.
    """
    if not drafter.attends_first:
        length = batch.token_ids.shape[1]
        num_passes = visible.shape[2] // length
        index = torch.arange(length, device=visible.device)
        is_readable = (batch.positions > 0)[:, None] | (index == index[:, None])
        visible = visible & is_readable.repeat(1, 1, num_passes)
    return visible.unsqueeze(1)


def _memory_inputs(
    drafter: JakiroDrafter, encoded: tuple[Tensor, ...], batch: Batch, sample: int
) -> TrunkInputs:
    """Return the memory with a mask that ends at each position's anchor, if the trunk reads it."""
    count = len(drafter.trunk.memory_shapes)
    if not count:
        return TrunkInputs()
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    verified = same_document(batch.documents) & (index <= batch.anchors[:, sample, :, None])
    memory = tuple(map(KV, encoded[:count:2], encoded[1:count:2]))
    return TrunkInputs(memory=memory, mask=verified.unsqueeze(1))


class _EarlierKV:
    """Keys and values of a layer in all passes so far, any of which may be recomputed."""

    def __init__(self) -> None:
        self._up_to: list[KV] = []

    def of_pass(self, number: int) -> KVStore:
        """Return a function that joins the keys and values of pass `number` to those before it."""
        earlier = self._up_to[number - 1] if number else None

        def join(kv: KV) -> KV:
            if earlier is not None:
                pairs = zip(earlier, kv, strict=True)
                kv = KV(*(torch.cat(pair, dim=2) for pair in pairs))
            if len(self._up_to) == number:
                self._up_to.append(kv)
            return kv

        return join


def _ttt_mask(batch: Batch, num_passes: int) -> Bool[Tensor, "batch length keys"]:
    """Return the mask of the keys of all `num_passes` passes for positions of the last pass."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    same = same_document(batch.documents)
    first = same & (index[:, None] - index >= num_passes - 1)
    return torch.cat([first, *_own_passes(batch, num_passes)[1:]], dim=2)


def _own_passes(batch: Batch, num_passes: int) -> list[Bool[Tensor, "batch length length"]]:
    """For each pass, return a mask that selects the one key on the draft path of each position."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    behind = index[:, None] - index  # number of positions from a key to the query
    same = same_document(batch.documents)
    return [same & (behind == num_passes - number) for number in range(1, num_passes + 1)]


def _shift(
    features: Float[Tensor, "batch length hidden"], batch: Batch
) -> Float[Tensor, "batch length hidden"]:
    """Return the features of the preceding positions; zeros at the first token of a document."""
    before = features.roll(1, dims=1)
    return torch.where(batch.positions[:, :, None] > 0, before, 0.0)


def _earlier_embeddings(
    drafter: JakiroDrafter, embeddings: Float[Tensor, "batch length hidden"], batch: Batch
) -> Float[Tensor, "batch length earlier hidden"] | None:
    """Return the embeddings of the tokens before each position; None if the drafter reads none."""
    if not drafter.num_earlier:
        return None
    earlier = [embeddings := _shift(embeddings, batch) for _ in range(drafter.num_earlier)]
    return torch.stack(earlier, dim=2)


def through_tail(
    output: ExpertsOutput, tail: TargetTail, view: TargetView, batch: Batch, sample: int
) -> ExpertsOutput:
    """Return the output after its features have passed through the target's last layers.

    A predicted state attends to the target's own keys and values up to the anchor of the state's
    position. After the anchor, the state attends to keys and values of predicted states. All
    positions between an anchor and a position that uses this anchor must use the same anchor.
    """
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    same = same_document(batch.documents)
    anchors = batch.anchors[:, sample, :, None]
    predicted = same & (index > anchors) & (index <= index[:, None])
    cache = JoinedCache(view.tail_kv, tail.input_state)
    return _with_tail_output(output, tail, batch, [same & (index <= anchors), predicted], cache)


def _roll_through_tail(
    output: ExpertsOutput, tail: TargetTail, batch: Batch, sample: int, cache: JoinedCache
) -> ExpertsOutput:
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    verified = same_document(batch.documents) & (index <= batch.anchors[:, sample, :, None])
    visible = [verified, *_own_passes(batch, sample + 1)]
    return _with_tail_output(output, tail, batch, visible, cache)


def _transfer(
    output: ExpertsOutput, tail: TargetTail, view: TargetView, batch: Batch, sample: int
) -> ExpertsOutput:
    """Return the output after the target's last layers, which read the states of all levels.

    A state attends to the target's own keys and values up to the anchor of its position, and to the
    states of earlier levels at the same position.
    """
    rows = PseudoRows.of(output, batch.positions)
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    verified = same_document(batch.documents) & (index <= batch.anchors[:, sample, :, None])
    verified = verified.repeat_interleave(output.features.shape[2], dim=1)
    visible = torch.cat((verified, rows.own), dim=2)
    seen_positions = torch.cat((batch.positions, rows.positions), dim=1)
    cache = JoinedCache(view.tail_kv, tail.input_state)
    return with_features(output, tail.forward(*rows[:2], visible, seen_positions, cache))


def _with_tail_output(
    output: ExpertsOutput, tail: TargetTail, batch: Batch, visible: list[Tensor], cache: JoinedCache
) -> ExpertsOutput:
    positions = batch.positions
    seen_positions = positions.repeat(1, len(visible))
    seen = torch.cat(visible, dim=2)
    return output.with_tail_output(
        tail.forward(output.mean_feature, positions, seen, seen_positions, cache)
    )
