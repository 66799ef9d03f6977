"""One packed training batch: rows of documents or their pieces, with the anchors drawn for them."""

from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Packed rows. A row holds several documents that must not see each other, then padding.

    A piece of a document that was split counts as a document.

    `positions` restart at 0 in every document; `documents` numbers them within the row, padding is
    -1. `is_response[b, i]` says that token i is one the drafter shall learn to guess. `anchors`
    holds, per draw, the row index of the last verified token when position i is drafted. In a row
    that `is_narrow`, self-attention sees no token before the anchor's next. `numbers` say which of
    the run's rows these are, by which features are found; empty if nobody asks, and on the host.
    """

    token_ids: Int[Tensor, "batch rows"]
    positions: Int[Tensor, "batch rows"]
    documents: Int[Tensor, "batch rows"]
    is_response: Bool[Tensor, "batch rows"]
    anchors: Int[Tensor, "batch draws rows"]
    is_narrow: Bool[Tensor, " batch"]
    numbers: Int[Tensor, " numbered"] = field(default_factory=lambda: torch.empty(0).long())

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        parts = {one.name: getattr(self, one.name).to(device) for one in fields(self)}
        return type(self)(**(parts | {"numbers": self.numbers}))

    def targets_exist(self, ahead: int) -> Bool[Tensor, "batch rows"]:
        """Return whether the token `ahead` positions later is one to guess, of the same document.

        Args:
            ahead: at least 1; position i is asked about token i + ahead.
        """
        exists = torch.zeros_like(self.is_response)
        same = self.documents[:, ahead:] == self.documents[:, :-ahead]
        real = self.documents[:, :-ahead] >= 0
        exists[:, :-ahead] = same & real & self.is_response[:, ahead:]
        return exists
