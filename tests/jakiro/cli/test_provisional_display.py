"""Verified text replaces provisional text, wherever the latter has wrapped."""

import os
import re

import pytest

from jakiro.cli.provisional_display import ProvisionalDisplay

SIZE = os.terminal_size((10, 6))


class Screen:
    """A terminal without scrolling: a grid of characters, and a cursor."""

    def __init__(self) -> None:
        self.rows = [[" "] * SIZE.columns for _ in range(40)]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        """Show a text with the escape sequences that the display uses."""
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\n|\r", text):
            if part.startswith("\x1b"):
                self._move(part[-1], part[2:-1])
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
            elif part == "\r":
                self.column = 0
            else:
                self._put(part)

    def _put(self, char: str) -> None:
        if self.column == SIZE.columns:
            self.row, self.column = self.row + 1, 0
        self.rows[self.row][self.column] = char
        self.column += 1

    def _move(self, command: str, number: str) -> None:
        if command == "A":
            self.row -= int(number)
        elif command == "C":
            self.column += int(number)
        elif command == "J":
            below = [[" "] * SIZE.columns for _ in self.rows[self.row + 1 :]]
            self.rows[self.row + 1 :] = below
            self.rows[self.row][self.column :] = [" "] * (SIZE.columns - self.column)

    @property
    def text(self) -> list[str]:
        """The rows down to the last one with text."""
        lines = ["".join(row).rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def _screen_after(*parts: tuple[str, str]) -> list[str]:
    screen = Screen()
    display = ProvisionalDisplay(screen.write, is_terminal=True, size=SIZE)
    for kind, text in parts:
        getattr(display, kind)(text)
    return screen.text


@pytest.mark.parametrize("before", ["", "ab", "a line\n", "abcdefghij", "abcdefghijk", "x" * 29])
@pytest.mark.parametrize("guess", ["z", "zzzzzzzz", "z" * 10, "z" * 25, "z\nzz\n", "zz\nz"])
@pytest.mark.parametrize("after", ["", "yy", "y\nyyyyyyyyyyyy"])
def test_provisional_text_leaves_no_trace(before: str, guess: str, after: str) -> None:
    found = _screen_after(("verified", before), ("provisional", guess), ("verified", after))
    assert found == _screen_after(("verified", before + after))


def test_text_that_has_left_the_screen_stays_and_a_new_line_begins() -> None:
    found = _screen_after(("verified", "ab"), ("provisional", "z" * 100), ("verified", "cd"))
    assert found[-1] == "cd"
    assert found[0] == "abzzzzzzzz"


def test_without_a_terminal_only_verified_text_is_written() -> None:
    written: list[str] = []
    display = ProvisionalDisplay(written.append, is_terminal=False)
    display.verified("ab")
    display.provisional("cd")
    display.verified("ef")
    assert written == ["ab", "ef"]
