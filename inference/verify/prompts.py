"""Prompts to verify on: a few built-in ones, or a file of the user's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
_ROWS = (".jsonl", ".json")


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file.

    A name that ends in .jsonl or .json means one object per line, with the key `prompt` (a text, or
    a list of chat messages) or `messages`; any other file has one text per line. Empty lines count
    for nothing.

    Raises:
        PromptError: the file is missing, unreadable or empty, or a line is malformed.
    """
    is_rows = path.suffix in _ROWS
    prompts = [
        _from_row(line, f"{path}:{number}") if is_rows else line for number, line in _lines(path)
    ]
    if not prompts:
        raise PromptError(
            f"{path} holds no prompts", expected="one prompt per line", got="empty lines or none"
        )
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise PromptError(
            f"cannot read the prompts in {path}",
            expected="a file of UTF-8 text",
            got=got,
            remedy="check the name given to --prompts",
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _from_row(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(
            f"{place} is not JSON",
            expected="one object per line",
            got=error,
            remedy="end the file's name in .txt if its lines are plain text",
        ) from error
    prompt: Any = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if _is_text(prompt) or _is_chat(prompt):
        return prompt
    raise PromptError(
        f"{place} has no usable prompt",
        expected='an object with "prompt": text, or "messages": [{"role", "content"}, ...]',
        got=line if len(line) <= 80 else f"{line[:77]}...",
        remedy="correct this line",
    )


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) and bool(prompt)


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in prompt)
    )
