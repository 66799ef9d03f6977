"""Input of one forward pass of the target (tokens, positions, cache slots), and its output."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.target.cache import SlotCache
from jakiro.target.masks import ancestor_matrix, same_document


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
    """Return a step that reads consecutive tokens."""
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
