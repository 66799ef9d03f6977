"""A forward pass of the target: tokens, positions, cache slots, and attention masks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.target.cache import SlotCache
from jakiro.target.checks import ATTENTION_KINDS, CHUNKED, FULL, SLIDING


class WrittenNodes(NamedTuple):
    """Cached nodes of a tree that is processed level by level, including this step's queries."""

    slots: Int[Tensor, "batch written"]
    positions: Int[Tensor, "batch written"]
    seen: Bool[Tensor, "batch queries written"]


@dataclass(frozen=True)
class StepInput:
    """Tokens for one target forward pass: a prompt, a single token, or a root with its draft tree.

    Attributes:
        lengths: number of committed tokens per sequence; every query attends to all of them.
        highest_slot: highest slot that any sequence writes, as a number on the CPU.
        parents: index of each query's parent among the queries, -1 for a query without a parent;
            None for a chain, or if `written` is used instead.
        max_depth: number of nodes on the longest path among the queries; unused for a chain.
        documents: index of each query's document in a packed sequence, where documents do not
            attend to each other; None if each sequence is one document.
        written: all cached nodes of a tree that is processed in several steps, used instead of
            `parents`; None if this step processes a chain or a whole tree.
        rows: index of each sequence of this step in the cache; None for all sequences in order.
        start: first slot, as a number on the CPU, if all sequences write to the same slots, one
            after the other; otherwise None.
    """

    token_ids: Int[Tensor, "batch queries"]
    positions: Int[Tensor, "batch queries"]
    slots: Int[Tensor, "batch queries"]
    lengths: Int[Tensor, " batch"]
    highest_slot: int
    parents: Int[Tensor, "batch queries"] | None = None
    max_depth: int = 1
    documents: Int[Tensor, "batch queries"] | None = None
    written: WrittenNodes | None = None
    rows: Int[Tensor, " batch"] | None = None
    start: int | None = None


@dataclass(frozen=True)
class StepOutput:
    """Result of a target forward pass: features (after the final norm) and the updated cache."""

    features: Float[Tensor, "batch queries hidden"]
    step: StepInput
    cache: SlotCache


def chain_step(token_ids: Int[Tensor, "batch queries"], start: int) -> StepInput:
    batch, count = token_ids.shape
    positions = torch.arange(start, start + count, device=token_ids.device).expand(batch, -1)
    lengths = torch.full((batch,), start, device=token_ids.device)
    return StepInput(
        token_ids, positions, positions, lengths, highest_slot=start + count - 1, start=start
    )


def ancestors_of(step: StepInput) -> Bool[Tensor, "batch queries queries"]:
    """Return which queries of a step each query may attend to, including itself."""
    if step.parents is not None:
        return ancestor_matrix(step.parents, step.max_depth)
    batch, count = step.token_ids.shape
    chain = torch.ones(count, count, dtype=torch.bool, device=step.token_ids.device).tril()
    if step.documents is None:
        return chain.expand(batch, -1, -1)
    return chain & same_document(step.documents)


def with_sibling(step: StepInput) -> StepInput:
    """Return a step over a single token with a copy of the token in the next slot.

    The copy is needed because some kernels sum in another order for a single row than for several.
    """
    twice = torch.arange(2, device=step.slots.device)
    return StepInput(
        token_ids=step.token_ids.expand(-1, 2),
        positions=step.positions.expand(-1, 2),
        slots=step.slots + twice,
        lengths=step.lengths,
        highest_slot=step.highest_slot + 1,
        parents=torch.full_like(step.slots, -1).expand(-1, 2),
        max_depth=1,
        rows=step.rows,
    )


def ancestor_matrix(
    parents: Int[Tensor, "batch nodes"], max_depth: int
) -> Bool[Tensor, "batch nodes nodes"]:
    """Return a matrix in which each node's row is True at its ancestors and at the node itself."""
    count = parents.shape[1]
    if count == 1:
        return torch.ones_like(parents, dtype=torch.bool).unsqueeze(-1)
    nodes = torch.arange(count, device=parents.device)
    reach = ((parents.unsqueeze(-1) == nodes) | (nodes[:, None] == nodes)).float()
    steps = 1
    while steps < max_depth - 1:  # after k squarings, paths of up to 2^k + 1 nodes are complete
        reach = (reach @ reach).clamp(max=1.0)
        steps *= 2
    return reach.bool()


def same_document(
    documents: Int[Tensor, "batch tokens"],
) -> Bool[Tensor, "batch tokens tokens"]:
    return documents[:, :, None] == documents[:, None, :]


def slot_mask(
    lengths: Int[Tensor, " batch"],
    slots: Int[Tensor, "batch written"],
    seen: Bool[Tensor, "batch queries written"],
    num_slots: int,
) -> Bool[Tensor, "batch queries slots"]:
    """Return True for each slot that a query may attend to.

    A query attends to every committed slot (below its sequence's length) and, among the slots of
    uncommitted nodes, to those that `seen` marks.
    """
    committed = torch.arange(num_slots, device=slots.device) < lengths[:, None]
    mask = committed[:, None, :].expand(-1, seen.shape[1], -1).clone()
    return mask.scatter_(2, slots[:, None, :].expand_as(seen), seen)


Mask = Float[Tensor, "batch 1 queries slots"]
Masks = Mask | dict[str, Mask | None]


class TargetMasks:
    """Builds the attention masks of some of a target's layers; `TargetSpec` has the arguments."""

    def __init__(
        self,
        layer_kinds: tuple[str, ...],
        window: int | None,
        chunk: int | None,
        like: Tensor,
        *,
        is_recurrent: bool = False,
    ) -> None:
        self.kinds = sorted(set(layer_kinds))
        self._unmasked: list[str] = []
        if is_recurrent:  # transformers asks for these two names, even if no layer has them
            self._unmasked = sorted({*self.kinds, "linear_attention"} - ATTENTION_KINDS)
            self.kinds = sorted({*self.kinds, FULL} & ATTENTION_KINDS)
        self._reach = {SLIDING: window, CHUNKED: chunk}
        # Half of the lowest number: a score that is added to it never becomes infinite.
        extremes = like.new_tensor([0.0, torch.finfo(like.dtype).min / 2])
        self._values = extremes.unbind()  # added to the scores of visible and of hidden slots

    @property
    def reads_positions(self) -> bool:
        """Whether some layer attends only to positions near the query."""
        return any(self._reach.get(kind) is not None for kind in self.kinds)

    def __call__(
        self,
        visible: Bool[Tensor, "batch queries slots"],
        positions: Int[Tensor, "batch queries"],
        seen_positions: Int[Tensor, "batch slots"] | None,
    ) -> Masks:
        """Return one mask if all layers are of the same kind, otherwise one or None for each kind.

        Args:
            seen_positions: absolute position of the token in each slot. For a draft node, the
                position can differ from the slot. None if no layer `reads_positions`.
        """
        masks = {
            kind: self._additive(kind, visible, positions, seen_positions) for kind in self.kinds
        }
        if len(masks) == 1 and not self._unmasked:
            return masks[self.kinds[0]]
        return {**masks, **dict.fromkeys(self._unmasked)}

    def _additive(
        self, kind: str, visible: Tensor, positions: Tensor, seen: Tensor | None
    ) -> Tensor:
        reach = self._reach.get(kind)
        if reach is not None:
            assert seen is not None
            visible = visible & _within(reach, kind, positions[:, :, None], seen[:, None, :])
        shown, hidden = self._values
        return torch.where(visible, shown, hidden).unsqueeze(1)


def positions_in_slots(
    slots: Int[Tensor, "batch written"], positions: Int[Tensor, "batch written"], num_slots: int
) -> Int[Tensor, "batch slots"]:
    """Return the absolute position of the token in each slot: the slot itself, except for nodes."""
    seen = torch.arange(num_slots, device=slots.device).expand(len(slots), -1)
    return seen.scatter(1, slots, positions)


def _within(reach: int, kind: str, query: Tensor, seen: Tensor) -> Tensor:
    return query // reach == seen // reach if kind == CHUNKED else query - seen < reach
