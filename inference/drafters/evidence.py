"""What the queries of a draft tree may know of verified tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.row_buffer import RowBuffer, token_slots
from inference.tree_builder import Frontier
from jakiro.drafter import JakiroDrafter
from jakiro.experts import BankOutput
from moa.rows import Rows
from moa.trunk import Evidence


class EvidenceBelow:
    """Evidence for the passes of a drafter over trees below the roots.

    Every query sees the memory of all verified tokens. The root reads the feature of the last
    verified token, a node what was predicted at its parent.

    Args:
        model: the drafter; only what its trunk reads is looked up.
        kept: what it keeps of verified tokens, at their positions.
        lengths: number of verified tokens of each sequence.
        highest: the largest of them, known on the host.
    """

    def __init__(
        self, model: JakiroDrafter, kept: RowBuffer, lengths: Int[Tensor, " batch"], highest: int
    ) -> None:
        self._kept = kept
        self._reads_features = model.trunk.feature_input is not None
        self._rows: Rows | None = None
        if model.trunk.cross_attention is not None:
            self._rows = Rows(*kept.prefix(highest)[:2])
            slots = token_slots(0, self._rows.keys.shape[2], 1, lengths.device)
            self._is_verified = slots < lengths[:, None]

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
        previous = self._previous(positions, frontier, last) if self._reads_features else None
        if self._rows is None:
            return Evidence(previous)
        mask = self._is_verified[:, None, None].expand(-1, -1, positions.shape[1], -1)
        return Evidence(previous, self._rows, mask)

    def _previous(
        self, positions: Tensor, frontier: Frontier | None, last: BankOutput | None
    ) -> Float[Tensor, "batch queries hidden"]:
        if frontier is None or last is None:
            return previous_features(self._kept, positions)
        predicted = last.expected
        return predicted.gather(1, frontier.origin[:, :, None].expand(-1, -1, predicted.shape[2]))


def previous_features(
    kept: RowBuffer, positions: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows hidden"]:
    """Return the kept features of the tokens before `positions`; zeros before the first."""
    features = kept.last_at((positions - 1).clamp(min=0))
    return torch.where(positions[:, :, None] > 0, features.squeeze(1), 0.0)
