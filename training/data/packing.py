"""Packing: which pieces of which documents share a row."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from training.batch import Batch
from training.data.counts import PackCounts
from training.data.token_store import TokenStore

OPEN_ROWS = 64  # rows that wait for a piece that fits; more waste less, and take longer


class _Pieces(NamedTuple):
    """Consecutive tokens of one document each, by their places in the token store."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def chosen(self, which: npt.NDArray[Any]) -> "_Pieces":
        return _Pieces(self.starts[which], self.lengths[which])


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
    """Rows of whole documents; a document longer than a row is split into several.

    A row is filled with the longest piece that still fits, so little padding remains.

    Args:
        store: the tokens.
        documents: which of its documents to pack.
        row_length: tokens of a row.

    Attributes:
        counts: of what was packed, split and left out.
    """

    def __init__(
        self, store: TokenStore, documents: Iterable[SupportsIndex], row_length: int
    ) -> None:
        self.store = store
        self.row_length = row_length
        chosen = np.fromiter(documents, np.int64)
        pieces, has_response = _split(store, chosen, row_length)
        kept = pieces.chosen(has_response)
        # All rows, one after another: a few bytes for each piece, even of many millions.
        order, ends = array("q"), array("q", [0])
        for row in _pack(kept.lengths, row_length):
            order.extend(row)
            ends.append(len(order))
        self._pieces = kept.chosen(np.array(order, np.int64))
        self._ends = np.array(ends, np.int64)
        lengths = store.lengths[chosen]
        self.counts = PackCounts(
            documents=len(chosen),
            split=int((lengths > row_length).sum()),
            left_out=int((~has_response).sum()),
            left_out_tokens=int(pieces.lengths[~has_response].sum()),
            rows=len(self),
            padding=1 - int(kept.lengths.sum()) / (len(self) * row_length) if len(self) else 0.0,
        )

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, index: int) -> PackedRow:
        """Return one row; padding has document -1 and is no response."""
        row = PackedRow(
            token_ids=np.zeros(self.row_length, np.int64),
            positions=np.arange(self.row_length),
            documents=np.full(self.row_length, -1),
            is_response=np.zeros(self.row_length, np.bool_),
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


def _split(
    store: TokenStore, documents: npt.NDArray[np.int64], row_length: int
) -> tuple[_Pieces, npt.NDArray[np.bool_]]:
    """Return pieces that fit into rows, and which of them have a response.

    Every document has one, so only those of several pieces are looked at.
    """
    begins, lengths = store.starts[documents], store.lengths[documents]
    counts = -(-lengths // row_length)
    firsts = np.cumsum(counts) - counts
    offsets = (np.arange(counts.sum()) - np.repeat(firsts, counts)) * row_length
    pieces = _Pieces(
        starts=np.repeat(begins, counts) + offsets,
        lengths=np.minimum(np.repeat(lengths, counts) - offsets, row_length),
    )
    has_response = np.ones(len(offsets), np.bool_)
    for document in np.flatnonzero(counts > 1):
        own = slice(firsts[document], firsts[document] + counts[document])
        tokens = slice(begins[document], begins[document] + lengths[document])
        has_response[own] = np.logical_or.reduceat(store.is_response[tokens], offsets[own])
    return pieces, has_response


def _pack(lengths: npt.NDArray[np.int64], row_length: int) -> Iterator[list[int]]:
    """Best fit among a bounded number of open rows, kept in the order of their free tokens."""
    open_rows: list[tuple[int, int]] = []  # free tokens, and the key of the row's pieces
    contents: dict[int, list[int]] = {}
    for piece, length in enumerate(array("q", lengths.tobytes())):
        place = bisect_left(open_rows, (length, -1))
        free, row = open_rows.pop(place) if place < len(open_rows) else (row_length, piece)
        contents.setdefault(row, []).append(piece)
        if free == length:
            yield contents.pop(row)
            continue
        insort(open_rows, (free - length, row))
        if len(open_rows) > OPEN_ROWS:
            yield contents.pop(open_rows.pop(0)[1])
    yield from contents.values()
