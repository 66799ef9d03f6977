"""Splitting documents over rows, so that rows are full: which tokens of which documents share one.

No piece is shorter than a fortieth of a row if that can be helped, for it would have little to
learn from; as much of a row may be left as padding.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import NamedTuple

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
        row_length: tokens of a row.
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
        row_length: int,
        free: Iterable[int] = (),
        is_useful: Callable[[Piece], bool] = lambda _: True,
    ) -> None:
        self.starts, self.lengths, self.rows = array("q"), array("q"), array("q")
        self.left_out: list[Piece] = []
        self.num_split = 0
        self._row_length = row_length
        self._shortest = max(2, row_length // _PARTS)
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
