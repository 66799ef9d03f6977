"""Layout of packed sequences: whole documents, or documents that are split to fill sequences."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from training.data.counts import TOLERATED_PADDING, Fill
from training.data.token_store import TokenStore

_PARTS = 40  # pieces of documents split to fill sequences have at least 1/40 of a sequence


class Piece(NamedTuple):
    """Consecutive tokens of one document."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The index after the piece's last token."""
        return self.start + self.length


class SequenceFilling:
    """Sequences that are filled with one document after another; some documents are split.

    A document that fits into the free space of a sequence stays whole, in the sequence where it
    leaves the least space. Otherwise, the beginning of the document fills the sequence with the
    most space, or starts a new sequence if that beginning would contain no response. The rest is
    treated as another document. If all documents are texts, all but one of the new sequences have
    less than 5% padding.

    Args:
        free: number of free tokens in each existing sequence.
        is_useful: function that returns whether a piece contains a response.

    Attributes:
        sequences: index of the sequence that contains each of these pieces; the existing sequences
            have the lowest indices.
        left_out: dropped pieces, which have no response or only a single token.
    """

    def __init__(
        self,
        sequence_length: int,
        free: Iterable[int] = (),
        is_useful: Callable[[Piece], bool] = lambda _: True,
    ) -> None:
        self.starts, self.lengths, self.sequences = array("q"), array("q"), array("q")
        self.left_out: list[Piece] = []
        self.num_split = 0
        self._sequence_length = sequence_length
        self._shortest = max(2, sequence_length // _PARTS)
        self._is_useful = is_useful
        # Number of free tokens and index of each sequence that is not full, sorted by free tokens.
        self._open: list[tuple[int, int]] = []
        self._num_sequences = 0
        for tokens in free:
            self._begin(tokens)

    def add(self, document: Piece) -> None:
        """Put the pieces of a document into sequences, or into `left_out`."""
        rest, num_pieces = document, 0
        while rest.length:
            head = self._head(rest)
            rest, num_pieces = Piece(head.end, rest.end - head.end), num_pieces + 1
            if self._is_kept(head):
                self._put(head)
            else:
                self.left_out.append(head)
        self.num_split += num_pieces > 1

    def _head(self, rest: Piece) -> Piece:
        """Return the first piece of `rest`, to be put into one sequence or dropped."""
        most = self._open[-1][0] if self._open else 0
        within_most = Piece(rest.start, self._length_within(most, rest.length))
        if self._is_kept(within_most):
            return within_most
        length = self._length_within(self._sequence_length, rest.length)
        # `length` is 0 if the rest is too short for two pieces of the shortest length.
        return Piece(rest.start, length or min(rest.length, self._sequence_length))

    def _length_within(self, free: int, length: int) -> int:
        """Return how many of `length` remaining tokens fit into `free` tokens of a sequence."""
        if length <= free:
            return length
        head = min(free, length - self._shortest)
        return head if head >= self._shortest else 0

    def _is_kept(self, piece: Piece) -> bool:
        return piece.length > 1 and self._is_useful(piece)

    def _put(self, piece: Piece) -> None:
        if not self._open or piece.length > self._open[-1][0]:
            self._begin(self._sequence_length)
        free, index = self._open.pop(bisect_left(self._open, (piece.length, -1)))
        self.starts.append(piece.start)
        self.lengths.append(piece.length)
        self.sequences.append(index)
        self._keep_open(free - piece.length, index)

    def _begin(self, free: int) -> None:
        self._keep_open(free, self._num_sequences)
        self._num_sequences += 1

    def _keep_open(self, free: int, index: int) -> None:
        if free >= self._shortest:
            insort(self._open, (free, index))


OPEN_SEQUENCES = 64  # number of sequences kept open; more of them reduce padding but take longer

Split = Literal["never", "texts", "all"]


class Pieces(NamedTuple):
    """Pieces of documents: indices of their first tokens in the token store, and their lengths."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def select(self, indices: npt.NDArray[Any]) -> "Pieces":
        """Return the pieces selected by indices or by a mask."""
        return Pieces(self.starts[indices], self.lengths[indices])


@dataclass(frozen=True)
class Layout:
    """The pieces of all sequences, one sequence after another, in compact arrays.

    Attributes:
        ends: index of the first piece of each sequence, followed by the total number of pieces.
        left_out: number of tokens of each dropped piece.
        filled_with: kind of documents that were split to fill sequences, "texts" or "all"; None if
            no document was split for this purpose.
    """

    pieces: Pieces
    ends: npt.NDArray[np.int64]
    left_out: npt.NDArray[np.int64]
    num_split: int
    filled_with: Fill | None = None

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.ends) - 1

    @property
    def used(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each sequence that are not padding."""
        return np.diff(np.concatenate([[0], np.cumsum(self.pieces.lengths)])[self.ends])

    def padding(self, sequence_length: int) -> float:
        """Return the fraction of all tokens that is padding."""
        size = self.num_sequences * sequence_length
        return 1 - int(self.pieces.lengths.sum()) / size if size else 0.0


def lay_out(
    store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int, split: Split
) -> Layout:
    """Return the layout of the packed sequences of the given documents.

    Documents longer than a sequence are always split. Other documents are split only if `split`
    allows this, if there would otherwise be more than 5% padding, and if splitting reduces the
    number of sequences.
    """
    whole = _whole(store, documents, sequence_length)
    if whole.padding(sequence_length) <= TOLERATED_PADDING:
        return whole
    is_text = store.is_text[documents]
    choices = {"never": np.zeros_like(is_text), "texts": is_text, "all": np.ones_like(is_text)}
    is_divisible = choices[split]
    if is_divisible.any():
        filled = _filled(store, documents[~is_divisible], documents[is_divisible], sequence_length)
        if filled.num_sequences < whole.num_sequences:
            return replace(filled, filled_with="texts" if is_text[is_divisible].all() else "all")
    return whole


def _whole(store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int) -> Layout:
    pieces, is_useful = _split(store, documents, sequence_length)
    kept = pieces.select(is_useful)
    order, ends = array("q"), array("q", [0])
    for content in _pack(kept.lengths, sequence_length):
        order.extend(content)
        ends.append(len(order))
    return Layout(
        pieces=kept.select(np.array(order, np.int64)),
        ends=np.array(ends, np.int64),
        left_out=pieces.lengths[~is_useful],
        num_split=int((store.lengths[documents] > sequence_length).sum()),
    )


def _filled(
    store: TokenStore,
    undivided: npt.NDArray[np.int64],
    divisible: npt.NDArray[np.int64],
    sequence_length: int,
) -> Layout:
    """Lay out the undivided documents, and fill free space and new sequences with the others."""
    whole = _whole(store, undivided, sequence_length)
    filling = SequenceFilling(
        sequence_length,
        (sequence_length - whole.used).tolist(),
        lambda piece: bool(store.is_response[piece.start : piece.end].any()),
    )
    begins, lengths = store.starts[divisible].tolist(), store.lengths[divisible].tolist()
    for begin, length in zip(begins, lengths, strict=True):
        filling.add(Piece(begin, length))
    before = np.repeat(np.arange(whole.num_sequences), np.diff(whole.ends))
    sequences = _joined(before, filling.sequences)
    pieces = Pieces(
        _joined(whole.pieces.starts, filling.starts), _joined(whole.pieces.lengths, filling.lengths)
    )
    left_out = [piece.length for piece in filling.left_out]
    return Layout(
        pieces=pieces.select(np.argsort(sequences, kind="stable")),
        ends=np.concatenate([[0], np.cumsum(np.bincount(sequences))]).astype(np.int64),
        left_out=_joined(whole.left_out, left_out),
        num_split=whole.num_split + filling.num_split,
    )


def _joined(first: npt.NDArray[np.int64], second: Any) -> npt.NDArray[np.int64]:
    return np.concatenate([first, np.array(second, np.int64)])


def _split(
    store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int
) -> tuple[Pieces, npt.NDArray[np.bool_]]:
    """Return pieces that fit into sequences, and whether each has a response and at least 2 tokens.

    Every whole document meets these conditions, so only pieces of split documents are examined.
    """
    begins, lengths = store.starts[documents], store.lengths[documents]
    counts = -(-lengths // sequence_length)
    firsts = np.cumsum(counts) - counts
    offsets = (np.arange(counts.sum()) - np.repeat(firsts, counts)) * sequence_length
    pieces = Pieces(
        starts=np.repeat(begins, counts) + offsets,
        lengths=np.minimum(np.repeat(lengths, counts) - offsets, sequence_length),
    )
    is_useful = pieces.lengths > 1
    for document in np.flatnonzero(counts > 1):
        own = slice(firsts[document], firsts[document] + counts[document])
        tokens = slice(begins[document], begins[document] + lengths[document])
        is_useful[own] &= np.logical_or.reduceat(store.is_response[tokens], offsets[own])
    return pieces, is_useful


def _pack(lengths: npt.NDArray[np.int64], sequence_length: int) -> Iterator[list[int]]:
    """Pack pieces by best fit into a few open sequences; yield each sequence's piece indices."""
    unfilled: list[tuple[int, int]] = []  # number of free tokens, and key in `contents`
    contents: dict[int, list[int]] = {}
    for piece, length in enumerate(array("q", lengths.tobytes())):
        rank = bisect_left(unfilled, (length, -1))
        free, key = unfilled.pop(rank) if rank < len(unfilled) else (sequence_length, piece)
        contents.setdefault(key, []).append(piece)
        if free == length:
            yield contents.pop(key)
            continue
        insort(unfilled, (free - length, key))
        if len(unfilled) > OPEN_SEQUENCES:
            yield contents.pop(unfilled.pop(0)[1])
    yield from contents.values()
