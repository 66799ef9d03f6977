"""Packing: which pieces of which documents share a row."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from training.data.counts import PackCounts
from training.data.row_layout import Split, lay_out
from training.data.token_store import TokenStore
from training.loss.batch import Batch


@dataclass(frozen=True)
class PackedRow:
    """One row: token ids, positions, documents and responses as in `Batch`, and document starts."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    is_response: npt.NDArray[np.bool_]

    @property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """Row index of the first token of each position's document."""
        return np.arange(len(self.positions)) - self.positions


RowWithAnchors = tuple[PackedRow, npt.NDArray[np.int64]]  # anchors: [draws, rows]


class PackedRows:
    """Rows of documents, which are split where they are longer than a row, or to fill rows.

    A piece is a document of its own, with its part of the responses; see `lay_out`.

    Args:
        store: the tokens.
        documents: which of its documents to pack.
        sequence_length: tokens of a row.
        split: which of them are split to fill rows.

    Attributes:
        counts: of what was packed, split and left out.
    """

    def __init__(
        self,
        store: TokenStore,
        documents: Iterable[SupportsIndex],
        sequence_length: int,
        split: Split = "never",
    ) -> None:
        self.store = store
        self.sequence_length = sequence_length
        chosen = np.fromiter(documents, np.int64)
        layout = lay_out(store, chosen, sequence_length, split)
        self._pieces, self._ends = layout.pieces, layout.ends
        self.counts = PackCounts(
            documents=len(chosen),
            split=layout.num_split,
            left_out=len(layout.left_out),
            left_out_tokens=int(layout.left_out.sum()),
            rows=len(self),
            padding=layout.padding(sequence_length),
            filled_with=layout.filled_with,
            wider_split=layout.wider_split,
        )

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, index: int) -> PackedRow:
        """Return one row; padding has document -1 and is no response."""
        row = PackedRow(
            token_ids=np.zeros(self.sequence_length, np.int64),
            positions=np.arange(self.sequence_length),
            documents=np.full(self.sequence_length, -1),
            is_response=np.zeros(self.sequence_length, np.bool_),
        )
        begin = 0
        own = self._pieces.chosen(np.arange(self._ends[index], self._ends[index + 1]))
        for number, (start, length) in enumerate(zip(*own, strict=True)):
            end, source = begin + length, slice(start, start + length)
            row.token_ids[begin:end] = self.store.token_ids[source]
            row.is_response[begin:end] = self.store.is_response[source]
            row.documents[begin:end] = number
            row.positions[begin:end] -= begin
            begin = end
        row.positions[begin:] -= begin
        return row

    def describe(self, index: int) -> str:
        """Return where the documents of a row stand in the data."""
        begins = self._pieces.starts[self._ends[index] : self._ends[index + 1]]
        after = np.searchsorted(self.store.starts, begins, "right")
        return self.store.describe([int(one) - 1 for one in after])


def collate(rows: Iterable[RowWithAnchors], is_narrow: bool = False) -> Batch:
    """Return rows and their anchors as one batch."""
    packed, anchors = zip(*rows, strict=True)
    columns = (
        [getattr(row, name) for row in packed]
        for name in ("token_ids", "positions", "documents", "is_response")
    )
    tensors = [torch.from_numpy(np.stack(column)) for column in (*columns, anchors)]
    tensors.append(torch.full((len(packed),), is_narrow))
    return Batch(*tensors)
