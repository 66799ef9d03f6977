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

    def of(
        self,
        positions: Int[Tensor, "batch queries"],
        frontier: Frontier | None,
        last: BankOutput | None,
    ) -> Evidence:
        """Return the evidence for the nodes of a frontier.

        Args:
            positions: of the queries.
            frontier: the queries, or None for the root.
            last: what the drafter said at their parents.
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
    return _PreviousFeature(memory)


class _MemoryOfVerified:
    """Every query sees the memory of all verified tokens; the anchor is the last of them."""

    def __init__(self, memory: RowBuffer, lengths: Tensor, highest: int) -> None:
        keys, values, *vectors = memory.prefix(highest)
        self._rows = Rows(keys, values)
        slots = token_slots(0, keys.shape[2], 1, lengths.device)
        self._is_verified = slots < lengths[:, None]
        self._place = lengths[:, None] - 1
        # Only a trunk that reads anchors keeps vectors beside rows.
        self._anchor = memory.at(self._place)[2].squeeze(1) if vectors else None

    def of(
        self,
        positions: Int[Tensor, "batch queries"],
        frontier: Frontier | None,
        last: BankOutput | None,
    ) -> MemoryView:
        count = positions.shape[1]
        mask = self._is_verified[:, None, None].expand(-1, -1, count, -1)
        if self._anchor is None:
            return MemoryView(self._rows, mask)
        anchor = self._anchor.expand(-1, count, -1)
        return MemoryView(self._rows, mask, anchor, positions - self._place)


class _PreviousFeature:
    """The root sees the last verified token's feature, a node what was predicted at its parent."""

    def __init__(self, memory: RowBuffer) -> None:
        self._memory = memory

    def of(
        self,
        positions: Int[Tensor, "batch queries"],
        frontier: Frontier | None,
        last: BankOutput | None,
    ) -> Float[Tensor, "batch queries hidden"]:
        if frontier is None:
            return previous_features(self._memory, positions)
        assert last is not None
        predicted = last.expected
        return predicted.gather(1, frontier.origin[:, :, None].expand(-1, -1, predicted.shape[2]))


def previous_features(
    memory: RowBuffer, positions: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows hidden"]:
    """Return the kept features of the tokens before `positions`; zeros before the first."""
    (features,) = memory.at((positions - 1).clamp(min=0))
    return torch.where(positions[:, :, None] > 0, features.squeeze(1), 0.0)
