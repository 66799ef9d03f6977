"""Packing: which pieces of which documents share a row."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from training.batch import Batch
from training.data.token_store import TokenStore

OPEN_ROWS = 64  # rows that wait for a piece that fits; more waste less, and take longer


class Piece(NamedTuple):
    """Consecutive tokens of one document, by their place in the token store."""

    start: int
    length: int


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
    """

    def __init__(self, store: TokenStore, documents: Iterable[int], row_length: int) -> None:
        self.store = store
        self.row_length = row_length
        self._rows = list(_pack(_split(store, documents, row_length), row_length))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> PackedRow:
        """Return one row; padding has document -1 and is no response."""
        row = PackedRow(
            token_ids=np.zeros(self.row_length, np.int64),
            positions=np.arange(self.row_length),
            documents=np.full(self.row_length, -1),
            is_response=np.zeros(self.row_length, np.bool_),
        )
        begin = 0
        for number, piece in enumerate(self._rows[index]):
            end, source = begin + piece.length, slice(piece.start, piece.start + piece.length)
            row.token_ids[begin:end] = self.store.token_ids[source]
            row.is_response[begin:end] = self.store.is_response[source]
            row.documents[begin:end] = number
            row.positions[begin:end] -= begin
            begin = end
        row.positions[begin:] -= begin
        return row

    def documents(self, index: int) -> list[int]:
        """Return which of the store's documents a row holds, by their place in it."""
        begins = [piece.start for piece in self._rows[index]]
        return [int(np.searchsorted(self.store.starts, begin, "right")) - 1 for begin in begins]


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


def _split(store: TokenStore, documents: Iterable[int], row_length: int) -> Iterator[Piece]:
    for document in documents:
        begin, end = int(store.starts[document]), int(store.starts[document + 1])
        for start in range(begin, end, row_length):
            length = min(row_length, end - start)
            if store.is_response[start : start + length].any():
                yield Piece(start, length)


def _pack(pieces: Iterable[Piece], row_length: int) -> Iterator[tuple[Piece, ...]]:
    """Best fit among a bounded number of open rows, kept in the order of their free tokens."""
    open_rows: list[tuple[int, int]] = []  # free tokens, and the key of the row's pieces
    contents: dict[int, list[Piece]] = {}
    for key, piece in enumerate(pieces):
        place = bisect_left(open_rows, (piece.length, -1))
        free, row = open_rows.pop(place) if place < len(open_rows) else (row_length, key)
        contents.setdefault(row, []).append(piece)
        if free == piece.length:
            yield tuple(contents.pop(row))
            continue
        insort(open_rows, (free - piece.length, row))
        if len(open_rows) > OPEN_ROWS:
            yield tuple(contents.pop(open_rows.pop(0)[1]))
    yield from map(tuple, contents.values())
