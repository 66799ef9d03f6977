"""Which pieces of which documents share a row: whole documents, or split ones that fill rows."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from training.data.counts import Fill
from training.data.token_store import TokenStore

_PARTS = 40  # of a row, each the shortest piece that a document is split into


class Piece(NamedTuple):
    """Consecutive tokens of one document."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """Where the next piece may start."""
        return self.start + self.length


class RowFilling:
    """Rows that documents are laid into one after another, split where that fills a row.

    A document goes whole where it leaves the least space; where there is no space for it, its
    beginning fills the row with the most, or begins another one if it would hold no response. Of
    texts, so all but one of the rows that are begun here have less than a twentieth of padding.

    Args:
        sequence_length: tokens of a row.
        free: tokens that are left in the rows to begin with.
        is_useful: tells whether a piece has a response.

    Attributes:
        starts: of all pieces that were laid into rows.
        lengths: of them.
        rows: number of the row of each, those to begin with first.
        left_out: pieces without a response, or of one token, which nothing follows.
        num_split: documents of several pieces.
    """

    def __init__(
        self,
        sequence_length: int,
        free: Iterable[int] = (),
        is_useful: Callable[[Piece], bool] = lambda _: True,
    ) -> None:
        self.starts, self.lengths, self.rows = array("q"), array("q"), array("q")
        self.left_out: list[Piece] = []
        self.num_split = 0
        self._row_length = sequence_length
        self._shortest = max(2, sequence_length // _PARTS)
        self._is_useful = is_useful
        # Free tokens and number of each row that is not full, in this order.
        self._open: list[tuple[int, int]] = []
        self._num_rows = 0
        for tokens in free:
            self._begin(tokens)

    def add(self, document: Piece) -> None:
        """Lay a document into rows, its beginning first."""
        rest, num_pieces = document, 0
        while rest.length:
            head = self._head(rest)
            rest, num_pieces = Piece(head.end, rest.end - head.end), num_pieces + 1
            if self._is_kept(head):
                self._place(head)
            else:
                self.left_out.append(head)
        self.num_split += num_pieces > 1

    def _head(self, rest: Piece) -> Piece:
        """Return what of the rest of a document goes into one row, or is left out."""
        most = self._open[-1][0] if self._open else 0
        within_most = Piece(rest.start, self._length_within(most, rest.length))
        if self._is_kept(within_most):
            return within_most
        length = self._length_within(self._row_length, rest.length)
        return Piece(rest.start, length or min(rest.length, self._row_length))  # rows of few tokens

    def _length_within(self, free: int, length: int) -> int:
        """Return how many of a document's last tokens go into a row with free ones; 0 for none."""
        if length <= free:
            return length
        head = min(free, length - self._shortest)
        return head if head >= self._shortest else 0

    def _is_kept(self, piece: Piece) -> bool:
        return piece.length > 1 and self._is_useful(piece)

    def _place(self, piece: Piece) -> None:
        if not self._open or piece.length > self._open[-1][0]:
            self._begin(self._row_length)
        free, row = self._open.pop(bisect_left(self._open, (piece.length, -1)))
        self.starts.append(piece.start)
        self.lengths.append(piece.length)
        self.rows.append(row)
        self._keep_open(free - piece.length, row)

    def _begin(self, free: int) -> None:
        self._keep_open(free, self._num_rows)
        self._num_rows += 1

    def _keep_open(self, free: int, row: int) -> None:
        if free >= self._shortest:
            insort(self._open, (free, row))


TOLERATED_PADDING = 0.05  # of what is read
OPEN_ROWS = 64  # rows that wait for a piece that fits; more waste less, and take longer

Split = Literal["never", "texts", "all"]


class Pieces(NamedTuple):
    """Consecutive tokens of one document each, by their places in the token store."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def chosen(self, which: npt.NDArray[Any]) -> "Pieces":
        return Pieces(self.starts[which], self.lengths[which])


@dataclass(frozen=True)
class Layout:
    """The pieces of all rows, one row after another: a few bytes each, even of many millions.

    Attributes:
        pieces: in the order of the rows.
        ends: of the rows among the pieces, the first one being 0.
        left_out: tokens of each piece that is in no row.
        num_split: documents of several pieces.
        filled_with: what was split to fill rows, "texts" only or "all"; None for nothing.
        wider_split: a setting by which more would be split, looked for where there is much padding.
    """

    pieces: Pieces
    ends: npt.NDArray[np.int64]
    left_out: npt.NDArray[np.int64]
    num_split: int
    filled_with: Fill | None = None
    wider_split: Fill | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.ends) - 1

    @property
    def used(self) -> npt.NDArray[np.int64]:
        """Tokens of each row that are no padding."""
        return np.diff(np.concatenate([[0], np.cumsum(self.pieces.lengths)])[self.ends])

    def padding(self, sequence_length: int) -> float:
        """Return the share of all rows that is padding."""
        size = self.num_rows * sequence_length
        return 1 - int(self.pieces.lengths.sum()) / size if size else 0.0


def lay_out(
    store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int, split: Split
) -> Layout:
    """Return rows of documents.

    Documents longer than a row are split. Others stay whole as long as that leaves no more than a
    twentieth of padding, as it does of documents about as long as a row, or if splitting would not
    make fewer rows.

    Args:
        store: the tokens.
        documents: which of its documents.
        sequence_length: tokens of a row.
        split: which documents may be split to fill rows: "never" any, plain "texts", or "all".
    """
    whole = _whole(store, documents, sequence_length)
    if whole.padding(sequence_length) <= TOLERATED_PADDING:
        return whole
    best, is_text = whole, store.is_text[documents]
    choices = {"never": np.zeros_like(is_text), "texts": is_text, "all": np.ones_like(is_text)}
    is_divisible = choices[split]
    if is_divisible.any():
        filled = _filled(store, documents[~is_divisible], documents[is_divisible], sequence_length)
        if filled.num_rows < whole.num_rows:
            best = replace(filled, filled_with="texts" if is_text[is_divisible].all() else "all")
    return replace(best, wider_split=_wider(split, is_text))


def _wider(split: Split, is_text: npt.NDArray[np.bool_]) -> Fill | None:
    """Return with which setting more documents would be split."""
    if split == "all" or (split == "texts" and is_text.all()):
        return None
    return "texts" if is_text.all() else "all"


def _whole(store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int) -> Layout:
    pieces, is_useful = _split(store, documents, sequence_length)
    kept = pieces.chosen(is_useful)
    order, ends = array("q"), array("q", [0])
    for row in _pack(kept.lengths, sequence_length):
        order.extend(row)
        ends.append(len(order))
    return Layout(
        pieces=kept.chosen(np.array(order, np.int64)),
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
    """Lay whole documents out, and others into what these leave and into more rows."""
    whole = _whole(store, undivided, sequence_length)
    filling = RowFilling(
        sequence_length,
        (sequence_length - whole.used).tolist(),
        lambda piece: bool(store.is_response[piece.start : piece.end].any()),
    )
    begins, lengths = store.starts[divisible].tolist(), store.lengths[divisible].tolist()
    for begin, length in zip(begins, lengths, strict=True):
        filling.add(Piece(begin, length))
    rows = _joined(np.repeat(np.arange(whole.num_rows), np.diff(whole.ends)), filling.rows)
    pieces = Pieces(
        _joined(whole.pieces.starts, filling.starts), _joined(whole.pieces.lengths, filling.lengths)
    )
    left_out = [piece.length for piece in filling.left_out]
    return Layout(
        pieces=pieces.chosen(np.argsort(rows, kind="stable")),
        ends=np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64),
        left_out=_joined(whole.left_out, left_out),
        num_split=whole.num_split + filling.num_split,
    )


def _joined(first: npt.NDArray[np.int64], second: Any) -> npt.NDArray[np.int64]:
    return np.concatenate([first, np.array(second, np.int64)])


def _split(
    store: TokenStore, documents: npt.NDArray[np.int64], sequence_length: int
) -> tuple[Pieces, npt.NDArray[np.bool_]]:
    """Return pieces that fit into rows, and which of them have a response and a second token.

    Every document has both, so only those of several pieces are looked at.
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
    """Best fit among a bounded number of open rows, kept in the order of their free tokens."""
    open_rows: list[tuple[int, int]] = []  # free tokens, and the key of the row's pieces
    contents: dict[int, list[int]] = {}
    for piece, length in enumerate(array("q", lengths.tobytes())):
        place = bisect_left(open_rows, (length, -1))
        free, row = open_rows.pop(place) if place < len(open_rows) else (sequence_length, piece)
        contents.setdefault(row, []).append(piece)
        if free == length:
            yield contents.pop(row)
            continue
        insort(open_rows, (free - length, row))
        if len(open_rows) > OPEN_ROWS:
            yield contents.pop(open_rows.pop(0)[1])
    yield from contents.values()
