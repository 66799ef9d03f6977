"""Prompts to verify on: a few built-in ones, or a file of the user's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from inference.prompts import Prompt
from jakiro.errors import PromptError

BUILT_IN: tuple[str, ...] = (
    "def read_lines(path):\n    ",
    "The first thing that she noticed when she came home was",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Water boils at a lower temperature on a mountain, because",
    "for number in range(1, 101):\n    if number % 15 == 0:\n        print(",
    "To change a tyre, you need a jack, a wrench and",
    "import json\n\nwith open('settings.json') as file:\n    settings =",
    "In the year 1969, three astronauts",
)
_JSON = (".jsonl", ".json")


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file.

    A name that ends in .jsonl or .json means one object per line, with the key `prompt` (a text, or
    a list of chat messages) or `messages`; any other file has one text per line. Empty lines count
    for nothing.

    Raises:
        PromptError: the file is missing, unreadable or empty, or a line is malformed.
    """
    return [_prompt_of(row) for row in read_rows(path)]


class Row(NamedTuple):
    """What one line of a file says of a prompt."""

    place: str  # file and line
    fields: dict[str, Any]

    def unusable(self, expected: str, got: object = None) -> PromptError:
        """Return the error that says so.

        Args:
            expected: what the line should hold.
            got: what it holds instead; the whole line if None.
        """
        return _unusable(self.place, expected, self.fields if got is None else got)


def read_rows(path: Path) -> list[Row]:
    """Return what the lines of a file say, without its empty ones.

    The lines of a .jsonl or .json file are objects; any other line is a text, as if it were an
    object with the one key `prompt`.

    Raises:
        PromptError: the file is missing, unreadable or empty, or a line is no JSON object.
    """
    is_json = path.suffix in _JSON
    rows = [
        _parsed(line, f"{path}:{number}") if is_json else Row(f"{path}:{number}", {"prompt": line})
        for number, line in _lines(path)
    ]
    if not rows:
        raise PromptError(
            f"{path} holds no prompts",
            expected="one prompt per line",
            got="empty lines or none",
            remedy="check the name of the file of prompts",
        )
    return rows


def is_text(prompt: Any) -> bool:
    """Return whether a value from JSON is a text that can be continued."""
    return isinstance(prompt, str) and bool(prompt)


def is_chat(prompt: Any) -> bool:
    """Return whether a value from JSON is a list of chat messages."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in prompt)
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise PromptError(
            f"cannot read the prompts in {path}",
            expected="a file of UTF-8 text",
            got=got,
            remedy="check the name of the file of prompts",
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _parsed(line: str, place: str) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise PromptError(
            f"{place} is not JSON",
            expected="one object per line",
            got=error,
            remedy="end the file's name in .txt if its lines are plain text",
        ) from error
    if not isinstance(fields, dict):
        raise _unusable(place, "one object per line", fields)
    return Row(place, fields)


def _prompt_of(row: Row) -> Prompt:
    prompt: Any = row.fields.get("prompt", row.fields.get("messages"))
    if is_text(prompt) or is_chat(prompt):
        return prompt
    raise row.unusable('an object with "prompt": text, or "messages": [{"role", "content"}, ...]')


def _unusable(place: str, expected: str, got: object) -> PromptError:
    shown = repr(got)
    return PromptError(
        f"{place} has no usable prompt",
        expected=expected,
        got=shown if len(shown) <= 80 else f"{shown[:77]}...",
        remedy="correct this line",
    )
