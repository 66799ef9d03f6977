"""The prompts of a comparison: texts, token ids, chats, and dialogues of several turns."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inference.generation.prompts import Prompt
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


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt, or a dialogue whose user's turns are known beforehand.

    Attributes:
        first: the prompt of the first turn, as `encode_prompt` takes it.
        later_turns: what the user says after each answer; then `first` is a chat.
        category: figures are also given by category.
        identity: a hash of the content, whatever its category.
    """

    first: Prompt
    later_turns: tuple[str, ...]
    category: str
    identity: str

    @property
    def num_turns(self) -> int:
        """Answers to be generated."""
        return 1 + len(self.later_turns)

    def chat_turn(self, answers: Sequence[str]) -> Prompt:
        """Return the prompt of the next turn: the whole dialogue so far.

        Args:
            answers: to all turns before; fewer than `num_turns`.
        """
        if not answers:
            return self.first
        messages: list[Any] = list(self.first)
        questions = self.later_turns[: len(answers)]
        for answer, question in zip(answers, questions, strict=True):
            messages += [{"role": "assistant", "content": answer}, _asked(question)]
        return messages


def read_bench_prompts(path: Path) -> list[BenchPrompt]:
    """Return the prompts of a file, in its order; equal ones are all kept (see `distinct`).

    A name that ends in .jsonl or .json means one object per line, with exactly one of the keys
    `prompt` (a text, a list of token ids, or a chat), `turns` (texts of the user, asked one after
    the other) and `messages` (a chat, to be answered), and perhaps a `category`, which is "all" by
    default; other keys are ignored. Any other file has one text per line. Empty lines count for
    nothing.

    Args:
        path: the file.

    Raises:
        PromptError: the file is missing, unreadable or empty, or a line is malformed.
    """
    return [bench_prompt_of(row) for row in read_rows(path)]


def bench_prompt_of(row: Row) -> BenchPrompt:
    """Return the prompt of one line; see `read_bench_prompts`.

    Raises:
        PromptError: it has none, or several.
    """
    given = [key for key in _FORMS if key in row.fields]
    if len(given) != 1:
        got = given or list(row.fields)
        raise row.unusable("exactly one of the keys prompt, turns and messages", got)
    key, form = given[0], _FORMS[given[0]]
    content = row.fields[key]
    if not form.fits(content):
        raise row.unusable(f"{key!r} to be {form.expected}", content)
    category = row.fields.get("category", "all")
    if not is_text(category):
        raise row.unusable("'category' to be a text that is not empty", category)
    if key == "turns":
        return _built([_asked(content[0])], tuple(content[1:]), category)
    return _built(content, (), category)


def distinct(prompts: Iterable[BenchPrompt]) -> list[BenchPrompt]:
    """Return the prompts without those whose content came before.

    An interval over prompts takes them as independent, which repetitions are not.
    """
    firsts: dict[str, BenchPrompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.identity, prompt)
    return list(firsts.values())


def prompt_of(first: Prompt, category: str = "all") -> BenchPrompt:
    """Return a prompt of one turn that comes from no file."""
    return _built(first, (), category)


class _Form(NamedTuple):
    """One of the ways to write a prompt."""

    expected: str
    fits: Callable[[Any], bool]


def _built(first: Prompt, later_turns: tuple[str, ...], category: str) -> BenchPrompt:
    # Escaped, since a text may hold half of a surrogate pair, which UTF-8 cannot encode.
    content = json.dumps([first, later_turns], sort_keys=True)
    identity = hashlib.sha256(content.encode("ascii")).hexdigest()[:16]
    return BenchPrompt(first, later_turns, category, identity)


def _asked(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def _is_prompt(value: Any) -> bool:
    return is_text(value) or _is_token_ids(value) or _is_question(value)


def _is_token_ids(value: Any) -> bool:
    # bool is an int for Python, but true is no token.
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def _is_question(value: Any) -> bool:
    return is_chat(value) and value[-1]["role"] != "assistant"


_CHAT = '[{"role", "content"}, ...], the last one not by the assistant'
_FORMS = {
    "prompt": _Form(f"a text, a list of token ids, or {_CHAT}", _is_prompt),
    "turns": _Form("a list of texts, one for each turn of the user", _are_turns),
    "messages": _Form(_CHAT, _is_question),
}
