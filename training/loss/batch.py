"""A training batch: packed sequences of documents, with the anchors of every position."""

from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Bool, Int
from torch import Tensor


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
    """

    token_ids: Int[Tensor, "batch length"]
    positions: Int[Tensor, "batch length"]
    documents: Int[Tensor, "batch length"]
    is_response: Bool[Tensor, "batch length"]
    anchors: Int[Tensor, "batch samples length"]
    is_narrow: Bool[Tensor, " batch"]
    sequence_ids: Int[Tensor, " numbered"] = field(default_factory=lambda: torch.empty(0).long())

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        parts = {part.name: getattr(self, part.name).to(device) for part in fields(self)}
        return type(self)(**(parts | {"sequence_ids": self.sequence_ids}))

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
