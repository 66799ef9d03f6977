"""Text in a terminal that is faint and underlined until the server has verified it."""

import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

from rich.cells import cell_len

_FAINT, _NORMAL = "\x1b[2;4m", "\x1b[0m"  # faint and underlined
_TAB = 8  # number of columns from one tab stop to the next


class _Cursor(NamedTuple):
    row: int
    column: int

    def after(self, text: str, width: int) -> "_Cursor":
        """Return where the cursor is after a text; a full row wraps at its next character."""
        row, column = self
        for char in text:
            if char == "\n":
                row, column = row + 1, 0
                continue
            cells = _TAB - column % _TAB if char == "\t" else cell_len(char)
            if column + cells > width:
                row, column = row + 1, 0
            column = min(column + cells, width)
        return _Cursor(row, column)


class ProvisionalDisplay:
    """Writes verified text, and after it provisional text, which verified text replaces.

    Args:
        is_terminal: whether text can be erased; otherwise, only verified text is written.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        is_terminal: bool,
        size: os.terminal_size | None = None,
    ) -> None:
        self._write = write
        self._is_terminal = is_terminal
        self._size = size
        self._verified = _Cursor(0, 0)  # end of the verified text
        self._end = self._verified  # end of all text

    def verified(self, text: str) -> None:
        """Write text that stays, in place of all provisional text."""
        self._erase()
        self._write(text)
        self._verified = self._end = self._verified.after(text, self._width)

    def provisional(self, text: str) -> None:
        """Write text that may be replaced."""
        if self._is_terminal and text:
            self._write(f"{_FAINT}{text}{_NORMAL}")
            self._end = self._end.after(text, self._width)

    @property
    def has_provisional(self) -> bool:
        """Whether there is provisional text at the end."""
        return self._end != self._verified

    @property
    def _width(self) -> int:
        return max(self._terminal.columns, 1)

    @property
    def _terminal(self) -> os.terminal_size:
        return self._size or shutil.get_terminal_size()

    def _erase(self) -> None:
        """Erase the provisional text, or begin a new line if its beginning has left the screen."""
        if not self.has_provisional:
            return
        begin = self._verified
        if begin.column == self._width:
            begin = _Cursor(begin.row + 1, 0)
        up = self._end.row - begin.row
        if up >= self._terminal.lines:
            self._write("\n")
            self._verified = _Cursor(0, 0)
            return
        self._write("\r" + (f"\x1b[{up}A" if up else ""))
        self._write((f"\x1b[{begin.column}C" if begin.column else "") + "\x1b[J")
