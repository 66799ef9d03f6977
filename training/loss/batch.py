"""A training batch, what the frozen target computes for it, and its positions with a loss.

For a position i that is drafted at distance d = i - anchor >= 1, and for levels k = 0, 1, ...:

    output at i, level k            predicts Y[i + k], the feature for the logits of x[i + k + 1]
    posterior used at level k       is conditioned on x[i + 1], ..., x[i + k]

Y[i] is the target's feature at position i, and x[i] is the token at position i. The posterior
consists of the mixture weights of the components, given these tokens.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.experts import ExpertsOutput
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache, StateSource, StateSources, TargetState
from jakiro.target.step import StepInput, StepOutput
from jakiro.target.tail import TailKV, TargetTail

ROOTS_OF_A_GROUP = 32  # number of blocks that are drafted together in training


@dataclass(frozen=True)
class Batch:
    """Packed sequences of documents, which must not attend to each other, followed by padding.

    Each piece of a split document is treated as a document.

    Attributes:
        positions: position of each token in its document, from 0.
        documents: index of each token's document within its sequence, from 0; -1 for padding.
        is_response: whether the drafter learns to predict each token.
        anchors: for every anchor sample and position, the index, within the sequence, of the last
            verified token from which the position is drafted.
        sequence_ids: indices of the sequences among all sequences of the run, by which stored
            target states are found. They stay on the CPU, and may be empty if target states are
            computed online.
        roots: on the meta device, where values are unknown, the positions from which a block trunk
            drafts; elsewhere these are the positions that are not their own anchors.
    """

    token_ids: Int[Tensor, "batch length"]
    positions: Int[Tensor, "batch length"]
    documents: Int[Tensor, "batch length"]
    is_response: Bool[Tensor, "batch length"]
    anchors: Int[Tensor, "batch samples length"]
    is_narrow: Bool[Tensor, " batch"]
    sequence_ids: Int[Tensor, " numbered"] = field(default_factory=lambda: torch.empty(0).long())
    roots: Int[Tensor, "sequences roots"] = field(default_factory=lambda: torch.empty(0, 0).long())

    def to(self, device: torch.device) -> "Batch":
        parts = {part.name: getattr(self, part.name).to(device) for part in fields(self)}
        return type(self)(**(parts | {"sequence_ids": self.sequence_ids}))

    def block_roots(self) -> Int[Tensor, "batch roots"]:
        """Return the positions of roots, and others in sequences that have fewer roots.

        There is a whole number of groups, unless sequences are shorter than that.
        """
        if self.roots.numel():
            return self.roots
        is_root = self.anchors[:, 0] < torch.arange(self.anchors.shape[2]).to(self.anchors)
        groups = -(-int(is_root.sum(dim=1).max()) // ROOTS_OF_A_GROUP)
        most = max(1, groups) * ROOTS_OF_A_GROUP
        return is_root.int().argsort(dim=1, descending=True, stable=True)[:, :most]

    def targets_exist(self, ahead: int) -> Bool[Tensor, "batch length"]:
        """Return whether the token `ahead` positions later is in a response of its document."""
        exists = torch.zeros_like(self.is_response)
        same = self.documents[:, ahead:] == self.documents[:, :-ahead]
        real = self.documents[:, :-ahead] >= 0
        exists[:, :-ahead] = same & real & self.is_response[:, ahead:]
        return exists


def indices_of(positions: Bool[Tensor, "batch length"]) -> Int[Tensor, " n"]:
    """Return the indices of the positions that are True, among all positions of a batch.

    On the meta device, where values are unknown, all positions are returned.
    """
    if positions.is_meta:
        return torch.arange(positions.numel(), device=positions.device)
    return positions.flatten().nonzero().squeeze(1)


class Normalizers(NamedTuple):
    """What the whole vocabulary contributes to the target's distribution at each position.

    The log-probability of a token is its logit minus `log_sum`; at another temperature than 1, all
    logits are divided by it before. With these values, the logits of the draft vocabulary are
    enough for a loss, which saves time if several passes or levels predict the same position, or if
    the normalizers are stored on disk. In half precision, a logit may be rounded differently in a
    matrix product with fewer rows, so that the probabilities may sum to slightly more than 1.
    """

    log_sum: Float[Tensor, "*positions"]
    best: Int[Tensor, "*positions"]

    def at(self, *indices: Tensor) -> "Normalizers":
        return Normalizers(self.log_sum[indices], self.best[indices])

    def to(self, device: torch.device) -> "Normalizers":
        return Normalizers(*(part.to(device) for part in self))

    def level(self, level: int) -> "Normalizers":
        return Normalizers(self.log_sum[..., level], self.best[..., level])


class Examples(NamedTuple):
    """The gathered positions, one sequence after another.

    Attributes:
        targets: the target's features that the drafter learns to predict. Where a level has none,
            the feature of level 0 takes its place.
        indices: index of each gathered position among all positions of the batch.
        chosen: indices of the active experts; None if all experts are active.
        normalizers: normalizers of the target's distributions at `targets`; None if they are not
            known.
    """

    features: Float[Tensor, "n levels components hidden"]
    log_weights: Float[Tensor, "n components"]
    gate: Float[Tensor, "n experts"]
    targets: Float[Tensor, "n levels hidden"]
    next_tokens: Int[Tensor, "n levels"]
    valid: Bool[Tensor, "n levels"]
    weight: Float[Tensor, " n"]
    sequence_sizes: tuple[int, ...]
    indices: Int[Tensor, " n"]
    chosen: Int[Tensor, "n active"] | None = None
    normalizers: Normalizers | None = None


def gather_examples(
    output: ExpertsOutput,
    target_features: Float[Tensor, "batch length hidden"],
    batch: Batch,
    sample: int,
    decay: float,
    normalizers: Normalizers | None = None,
) -> Examples:
    """Return the positions whose next token is a response token and whose distance is at least 1.

    Args:
        decay: factor gamma; the weight of a position at distance d is gamma^(d - 1).
    """
    levels, count = output.features.shape[2], batch.token_ids.shape[1]
    index = torch.arange(count, device=batch.token_ids.device)
    distance = index - batch.anchors[:, sample]
    valid = torch.stack([batch.targets_exist(1 + level) for level in range(levels)], dim=-1)
    has_loss = valid[..., 0] & (distance >= 1)
    indices, sequence_sizes = indices_of(has_loss), _sizes_of(has_loss)
    if has_loss.is_meta and batch.roots.numel():
        indices, sequence_sizes = batch.roots.flatten(), (batch.roots.shape[1],) * len(batch.roots)
    sequence, column = (indices // count)[:, None], (indices % count)[:, None]
    ahead = (column + torch.arange(levels, device=index.device)).clamp(max=count - 1)
    following = (ahead + 1).clamp(max=count - 1)
    is_there = valid.flatten(0, 1)[indices]
    goal = torch.where(is_there, ahead, column)
    return Examples(
        features=output.features.flatten(0, 1)[indices],
        log_weights=output.log_weights.flatten(0, 1)[indices],
        gate=output.gate.flatten(0, 1)[indices],
        chosen=None if output.chosen is None else output.chosen.flatten(0, 1)[indices],
        targets=target_features[sequence, goal],
        next_tokens=batch.token_ids[sequence, following],
        valid=is_there,
        weight=decay ** (distance.flatten()[indices] - 1).float(),
        sequence_sizes=sequence_sizes,
        indices=indices,
        normalizers=None if normalizers is None else normalizers.at(sequence, goal),
    )


def _sizes_of(has_loss: Bool[Tensor, "batch length"]) -> tuple[int, ...]:
    """Return the number of positions with a loss in each sequence; all positions on meta."""
    if has_loss.is_meta:
        batch, count = has_loss.shape
        return (count,) * batch
    return tuple(has_loss.sum(dim=1).tolist())


class TargetView(NamedTuple):
    """Outputs of the frozen target for a batch."""

    features: Float[Tensor, "batch length hidden"]
    state: TargetState
    embeddings: Float[Tensor, "batch length hidden"]
    tail_input: Float[Tensor, "batch length hidden"] | None = None
    tail_kv: TailKV = ()
    normalizers: Normalizers | None = None

    def to(self, dtype: torch.dtype) -> "TargetView":
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
