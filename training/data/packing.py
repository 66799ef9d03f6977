"""Packing of documents into sequences of equal length, and of sequences into batches."""

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
class PackedSequence:
    """One sequence of packed documents, with the same arrays as in `Batch`.

    Attributes:
        token_ids: token ids, 0 for padding, [sequence].
        positions: position of each token in its document, from 0, [sequence].
        documents: index, within the sequence, of each token's document; -1 for padding,
            [sequence].
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    is_response: npt.NDArray[np.bool_]

    @property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """The index, within the sequence, of the first token of each position's document."""
        return np.arange(len(self.positions)) - self.positions


SequenceWithAnchors = tuple[PackedSequence, npt.NDArray[np.int64]]  # anchors: [samples, sequence]


class PackedSequences:
    """All packed sequences of the given documents.

    Documents are split if they are longer than a sequence, or in order to fill sequences; see
    `lay_out`. Each piece is then treated as a document that contains the responses in the piece.
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
        indices = np.fromiter(documents, np.int64)
        layout = lay_out(store, indices, sequence_length, split)
        self._pieces, self._ends = layout.pieces, layout.ends
        self.counts = PackCounts(
            documents=len(indices),
            split=layout.num_split,
            left_out=len(layout.left_out),
            left_out_tokens=int(layout.left_out.sum()),
            sequences=len(self),
            padding=layout.padding(sequence_length),
            filled_with=layout.filled_with,
        )

    def __len__(self) -> int:
        return len(self._ends) - 1

    def sequence(self, index: int) -> PackedSequence:
        """Return one sequence; padding has document -1 and is not in a response."""
        sequence = PackedSequence(
            token_ids=np.zeros(self.sequence_length, np.int64),
            positions=np.arange(self.sequence_length),
            documents=np.full(self.sequence_length, -1),
            is_response=np.zeros(self.sequence_length, np.bool_),
        )
        begin = 0
        own = self._pieces.select(np.arange(self._ends[index], self._ends[index + 1]))
        for number, (start, length) in enumerate(zip(*own, strict=True)):
            end, source = begin + length, slice(start, start + length)
            sequence.token_ids[begin:end] = self.store.token_ids[source]
            sequence.is_response[begin:end] = self.store.is_response[source]
            sequence.documents[begin:end] = number
            sequence.positions[begin:end] -= begin
            begin = end
        sequence.positions[begin:] -= begin
        return sequence

    def describe(self, index: int) -> str:
        """Return the locations of a sequence's documents in the data."""
        begins = self._pieces.starts[self._ends[index] : self._ends[index + 1]]
        after = np.searchsorted(self.store.starts, begins, "right")
        return self.store.describe([int(document) - 1 for document in after])


def collate(sequences: Iterable[SequenceWithAnchors], is_narrow: bool = False) -> Batch:
    """Return sequences and their anchors as one batch.

    Args:
        is_narrow: whether self-attention is limited to the tokens after the anchor.
    """
    packed, anchors = zip(*sequences, strict=True)
    columns = (
        [getattr(sequence, name) for sequence in packed]
        for name in ("token_ids", "positions", "documents", "is_response")
    )
    tensors = [torch.from_numpy(np.stack(column)) for column in (*columns, anchors)]
    tensors.append(torch.full((len(packed),), is_narrow))
    return Batch(*tensors)
