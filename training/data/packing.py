"""Packing of documents into sequences of equal length, and of sequences into batches."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from jakiro.utils.wording import counted
from training.data.token_store import TokenStore
from training.loss.batch import Batch

# Kinds of documents that may be split to fill sequences; "alone": each has its own sequences.
Split = Literal["never", "texts", "all", "alone"]

# As fractions of the packed tokens: above the first, documents may be split, and above the second,
# the report says so.
TOLERATED_PADDING, _MUCH_PADDING = 0.05, 0.2
_OPEN_SEQUENCES = 64  # number of sequences kept open; more of them reduce padding but take longer
_PARTS = 40  # pieces of documents split to fill sequences have at least 1/40 of a sequence


@dataclass(frozen=True)
class PackedSequence:
    """One sequence of packed documents, with the same arrays as in `Batch`."""

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

    Documents longer than a sequence are always split. Other documents are split only if `split`
    allows this, if there would otherwise be more than 5% padding, and if splitting reduces the
    number of sequences. Each piece is then treated as a document that contains the responses in the
    piece.

    Attributes:
        filled_with: kind of documents that were split to fill sequences, even if they are shorter
            than a sequence; None if no document was split for this purpose. "alone" if each
            document has its own sequences.
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
        self.num_documents = len(indices)
        layout, self.filled_with = _lay_out(store, indices, sequence_length, split)
        self.padding = layout.padding
        self.num_split = layout.num_split
        self.left_out = [piece.length for piece in layout.left_out]
        sequences = np.array(layout.sequences, np.int64)
        pieces = np.array(layout.pieces, np.int64).reshape(-1, 2)
        self._pieces = pieces[np.argsort(sequences, kind="stable")]
        self._ends = np.concatenate([[0], np.cumsum(np.bincount(sequences))]).astype(np.int64)

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
        for number, (start, length) in enumerate(self._pieces_of(index)):
            end, source = begin + length, slice(start, start + length)
            sequence.token_ids[begin:end] = self.store.token_ids[source]
            sequence.is_response[begin:end] = self.store.is_response[source]
            sequence.documents[begin:end] = number
            sequence.positions[begin:end] -= begin
            begin = end
        sequence.positions[begin:] -= begin
        return sequence

    def report(self) -> Iterator[str]:
        read = self.store.counts
        if read is not None:
            yield from read.lines()
        line = (
            f"{counted(self.num_documents, 'document')} packed into "
            f"{counted(len(self), 'sequence')} with {self.padding:.1%} padding"
        )
        if self.num_split:
            line += f"; {counted(self.num_split, 'document')} split"
        if self.left_out:
            line += (
                f"; {counted(len(self.left_out), 'piece')} without a response or of fewer than two "
                f"tokens dropped ({counted(sum(self.left_out), 'token')})"
            )
        yield line
        if self.padding > _MUCH_PADDING and len(self) > 1:
            yield "there is much padding: try data.split=all, or another data.sequence_length"

    def _pieces_of(self, index: int) -> npt.NDArray[np.int64]:
        return self._pieces[self._ends[index] : self._ends[index + 1]]


class _Piece(NamedTuple):
    """Consecutive tokens of one document: index of the first one in the token store, and number."""

    start: int
    length: int


@dataclass
class _Layout:
    """Pieces of documents, and the index of the sequence that each of them belongs to."""

    sequence_length: int
    pieces: list[_Piece] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    left_out: list[_Piece] = field(default_factory=list)
    num_split: int = 0

    @property
    def num_sequences(self) -> int:
        return max(self.sequences, default=-1) + 1

    @property
    def padding(self) -> float:
        size = self.num_sequences * self.sequence_length
        return 1 - sum(piece.length for piece in self.pieces) / size if size else 0.0


def _lay_out(
    store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int, split: Split
) -> tuple[_Layout, Split | None]:
    whole = _whole(store, documents, sequence_length)
    if split == "alone":
        whole.sequences = list(range(len(whole.pieces)))
        return whole, split
    if split == "never" or whole.padding <= TOLERATED_PADDING:
        return whole, None
    is_text = store.is_text[documents]
    is_divisible = is_text if split == "texts" else np.ones_like(is_text)
    filled = _whole(store, documents[~is_divisible], sequence_length)
    filling = _Filling(store, filled)
    for piece in _pieces_at(store, documents[is_divisible]):
        filling.add(piece)
    if filled.num_sequences >= whole.num_sequences:
        return whole, None
    return filled, "texts" if is_text[is_divisible].all() else "all"


def _pieces_at(store: TokenStore, documents: npt.NDArray[np.int64]) -> Iterator[_Piece]:
    begins, ends = store.starts[documents].tolist(), store.starts[documents + 1].tolist()
    for begin, end in zip(begins, ends, strict=True):
        yield _Piece(begin, end - begin)


def _is_useful(store: TokenStore, piece: _Piece) -> bool:
    """Return whether a piece has at least two tokens and a response, as every document has."""
    inside = slice(piece.start, piece.start + piece.length)
    return piece.length > 1 and bool(store.is_response[inside].any())


def _whole(store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int) -> _Layout:
    """Return the layout of documents of which only those longer than a sequence are split."""
    layout = _Layout(sequence_length)
    for begin, length in _pieces_at(store, documents):
        is_whole = length <= sequence_length
        layout.num_split += not is_whole
        for offset in range(0, length, sequence_length):
            piece = _Piece(begin + offset, min(sequence_length, length - offset))
            is_kept = is_whole or _is_useful(store, piece)
            (layout.pieces if is_kept else layout.left_out).append(piece)
    layout.sequences = _best_fit([piece.length for piece in layout.pieces], sequence_length)
    return layout


def _best_fit(lengths: list[int], sequence_length: int) -> list[int]:
    """Return the sequence of each piece, packed by best fit into a limited number of sequences."""
    unfilled: list[tuple[int, int]] = []  # free tokens and first piece of each open sequence
    firsts: list[int] = []  # first piece of the sequence of each piece
    closed: dict[int, int] = {}  # number of each closed sequence, by its first piece
    for piece, length in enumerate(lengths):
        rank = bisect_left(unfilled, (length, -1))
        free, first = unfilled.pop(rank) if rank < len(unfilled) else (sequence_length, piece)
        firsts.append(first)
        if free == length:
            closed[first] = len(closed)
            continue
        insort(unfilled, (free - length, first))
        if len(unfilled) > _OPEN_SEQUENCES:
            closed[unfilled.pop(0)[1]] = len(closed)
    for first in sorted(first for _, first in unfilled):
        closed[first] = len(closed)
    return [closed[first] for first in firsts]


class _Filling:
    """Fills the sequences of a layout with one document after another, some of which are split.

    A document that fits into the free space of a sequence stays whole, in the sequence where it
    leaves the least space. Otherwise, the beginning of the document fills the sequence with the
    most space, or starts a new sequence if that beginning would contain no response. The rest is
    treated as another document. If all documents are texts, all but one of the new sequences have
    less than 5% padding.
    """

    def __init__(self, store: TokenStore, layout: _Layout) -> None:
        self._store = store
        self._layout = layout
        self._shortest = max(2, layout.sequence_length // _PARTS)
        # Number of free tokens and index of each sequence that is not full, sorted by free tokens.
        self._open: list[tuple[int, int]] = []
        self._num_sequences = layout.num_sequences
        free = [layout.sequence_length] * self._num_sequences
        for piece, sequence in zip(layout.pieces, layout.sequences, strict=True):
            free[sequence] -= piece.length
        for sequence, tokens in enumerate(free):
            self._keep_open(tokens, sequence)

    def add(self, rest: _Piece) -> None:
        """Put the pieces of a document into sequences, or leave them out."""
        num_pieces = 0
        while rest.length:
            head = self._head(rest)
            rest = _Piece(rest.start + head.length, rest.length - head.length)
            num_pieces += 1
            if _is_useful(self._store, head):
                self._put(head)
            else:
                self._layout.left_out.append(head)
        self._layout.num_split += num_pieces > 1

    def _head(self, rest: _Piece) -> _Piece:
        """Return the first piece of `rest`, to be put into one sequence or dropped."""
        most = self._open[-1][0] if self._open else 0
        within_most = _Piece(rest.start, self._length_within(most, rest.length))
        if _is_useful(self._store, within_most):
            return within_most
        length = self._length_within(self._layout.sequence_length, rest.length)
        # `length` is 0 if the rest is too short for two pieces of the shortest length.
        return _Piece(rest.start, length or min(rest.length, self._layout.sequence_length))

    def _length_within(self, free: int, length: int) -> int:
        """Return how many of `length` remaining tokens fit into `free` tokens of a sequence."""
        if length <= free:
            return length
        head = min(free, length - self._shortest)
        return head if head >= self._shortest else 0

    def _put(self, piece: _Piece) -> None:
        if self._open and piece.length <= self._open[-1][0]:
            free, sequence = self._open.pop(bisect_left(self._open, (piece.length, -1)))
        else:
            free, sequence = self._layout.sequence_length, self._num_sequences
            self._num_sequences += 1
        self._layout.pieces.append(piece)
        self._layout.sequences.append(sequence)
        self._keep_open(free - piece.length, sequence)

    def _keep_open(self, free: int, sequence: int) -> None:
        if free >= self._shortest:
            insort(self._open, (free, sequence))


def collate(sequences: Iterable[SequenceWithAnchors], is_narrow: bool = False) -> Batch:
    """Return sequences and their anchors as one batch."""
    packed, anchors = zip(*sequences, strict=True)
    columns = (
        [getattr(sequence, name) for sequence in packed]
        for name in ("token_ids", "positions", "documents", "is_response")
    )
    tensors = [torch.from_numpy(np.stack(column)) for column in (*columns, anchors)]
    tensors.append(torch.full((len(packed),), is_narrow))
    return Batch(*tensors)
