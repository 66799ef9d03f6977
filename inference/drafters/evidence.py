"""What the queries of a draft tree may know of verified tokens, for each kind of trunk."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.row_buffer import RowBuffer, token_slots
from inference.tree_builder import Frontier
from jakiro.drafter import Evidence, JakiroDrafter
from jakiro.experts import BankOutput
from moa.rows import Rows
from moa.trunk import MemoryView, MoaTrunk


@runtime_checkable
class EvidenceSource(Protocol):
    """Evidence for one pass of the drafter after the other."""

    def of(self, frontier: Frontier | None, last: BankOutput | None, count: int) -> Evidence:
        """Return the evidence for the nodes of a frontier.

        Args:
            frontier: the queries, or None for the root.
            last: what the drafter said at their parents.
            count: number of queries.
        """
        ...


def evidence_below(
    model: JakiroDrafter, memory: RowBuffer, lengths: Int[Tensor, " batch"], highest: int
) -> EvidenceSource:
    """Return the evidence for trees below the roots at positions `lengths`.

    Args:
        model: the drafter.
        memory: what it keeps of verified tokens, at their positions.
        lengths: number of verified tokens of each sequence.
        highest: the largest of them, known on the host.
    """
    if isinstance(model.trunk, MoaTrunk):
        return _MemoryOfVerified(memory, lengths, highest)
    return _PreviousFeature(memory, lengths)


class _MemoryOfVerified:
    """Every query sees the memory of all verified tokens."""

    def __init__(self, memory: RowBuffer, lengths: Tensor, highest: int) -> None:
        self._rows = Rows(*memory.prefix(highest))
        slots = token_slots(0, self._rows.keys.shape[2], 1, lengths.device)
        self._is_verified = slots < lengths[:, None]

    def of(self, frontier: Frontier | None, last: BankOutput | None, count: int) -> MemoryView:
        return MemoryView(self._rows, self._is_verified[:, None, None].expand(-1, -1, count, -1))


class _PreviousFeature:
    """The root sees the last verified token's feature, a node what was predicted at its parent."""

    def __init__(self, memory: RowBuffer, lengths: Tensor) -> None:
        self._memory, self._lengths = memory, lengths

    def of(
        self, frontier: Frontier | None, last: BankOutput | None, count: int
    ) -> Float[Tensor, "batch queries hidden"]:
        if frontier is None:
            return previous_features(self._memory, self._lengths[:, None])
        assert last is not None
        predicted = last.expected
        return predicted.gather(1, frontier.origin[:, :, None].expand(-1, -1, predicted.shape[2]))


def previous_features(
    memory: RowBuffer, positions: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows hidden"]:
    """Return the kept features of the tokens before `positions`; zeros before the first."""
    (features,) = memory.at((positions - 1).clamp(min=0))
    return torch.where(positions[:, :, None] > 0, features.squeeze(1), 0.0)
