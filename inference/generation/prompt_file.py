"""Prompt files: texts, token ids, chats, and dialogues of several chat turns."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

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


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt, or a dialogue whose user messages are all known beforehand.

    Attributes:
        later_turns: user messages that follow the answers, one per answer; if there are any,
            `first` is a chat.
    """

    first: Prompt
    later_turns: tuple[str, ...]
    category: str
    fingerprint: str

    @property
    def num_turns(self) -> int:
        """The number of answers to be generated."""
        return 1 + len(self.later_turns)

    def chat_turn(self, answers: Sequence[str]) -> Prompt:
        """Return the prompt of the next chat turn: the whole dialogue so far."""
        if not answers:
            return self.first
        messages: list[Any] = list(self.first)
        questions = self.later_turns[: len(answers)]
        for answer, question in zip(answers, questions, strict=True):
            messages += [{"role": "assistant", "content": answer}, _user_message(question)]
        return messages


def read_prompts(
    path: Path, max_prompts: int | None = None, *, training_records: bool = False
) -> list[BenchPrompt]:
    """Return the prompts of a file in order, including repetitions (see `distinct`).

    A file whose name ends in .jsonl or .json has one object per line, with exactly one of the keys
    `prompt` (a text, a list of token ids, or a chat), `turns` (the user messages of all turns,
    in order) and `messages` (a chat to be answered). The key `category` is optional and "all" by
    default. Other keys are ignored. Any other file has one text per line. Empty lines are skipped.

    Args:
        training_records: whether to accept records of training data as well. Their key `text` is
            read as `prompt`, and answers of the assistant at the end of a chat are removed.
    """
    prompts = []
    for location, text in islice(_lines(path), max_prompts):
        fields = _fields(text, location) if path.suffix in _JSON else {"prompt": text}
        if training_records:
            fields = _without_answer(fields)
        prompts.append(_prompt_in(fields, location))
    if not prompts:
        raise PromptError(
            f"{path} holds no prompts",
            expected="one prompt per line",
            got="an empty file, or only empty lines",
            remedy="check the name of the prompt file",
        )
    return prompts


def distinct(prompts: Iterable[BenchPrompt]) -> list[BenchPrompt]:
    """Return the prompts without repetitions of the same content.

    Confidence intervals over prompts assume independent prompts, and repetitions are not
    independent.
    """
    firsts: dict[str, BenchPrompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.fingerprint, prompt)
    return list(firsts.values())


def prompt_of(first: Prompt, category: str = "all") -> BenchPrompt:
    """Return a prompt of a single chat turn that does not come from a file."""
    return _built(first, (), category)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each line that is not empty."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise PromptError(
            f"cannot read the prompts in {path}",
            expected="a UTF-8 text file",
            got=got,
            remedy="check the name of the prompt file",
        ) from error
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.removesuffix("\r")


def _fields(text: str, location: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise PromptError(
            f"{location} is not JSON",
            expected="one JSON object per line",
            got=error,
            remedy="rename the file to .txt if its lines are plain text",
        ) from error
    if not isinstance(fields, dict):
        raise _unusable(location, "one JSON object per line", fields)
    return fields


def _prompt_in(fields: dict[str, Any], location: str) -> BenchPrompt:
    given = [key for key in _FORMS if key in fields]
    if len(given) != 1:
        got = given or [*fields]
        raise _unusable(location, "exactly one of the keys prompt, turns and messages", got)
    key, content = given[0], fields[given[0]]
    category = fields.get("category", "all")
    if not isinstance(category, str):
        raise _unusable(location, "'category' to be a text", category)
    expected, form = _FORMS[key]
    try:
        form.validate_python(content, strict=True)
    except ValidationError as error:
        raise _unusable(location, f"{key!r} to be {expected}", content) from error
    if key == "turns":
        return _built([_user_message(content[0])], tuple(content[1:]), category)
    return _built(content, (), category)


def _without_answer(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a record of training data as a prompt: its text, or its chat without the answer."""
    if "text" in fields:
        fields.setdefault("prompt", fields.pop("text"))
    for key in ("prompt", "messages"):
        messages: Any = fields.get(key)
        while isinstance(messages, list) and messages and _is_answer(messages[-1]):
            fields[key] = messages = messages[:-1]
    return fields


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") == "assistant"


def _unusable(location: str, expected: str, got: object) -> PromptError:
    return PromptError(
        f"{location} has no usable prompt",
        expected=expected,
        got=repr(got)[:80],
        remedy="correct this line",
    )


def _built(first: Prompt, later_turns: tuple[str, ...], category: str) -> BenchPrompt:
    content = json.dumps([first, later_turns], sort_keys=True)
    fingerprint = hashlib.sha256(content.encode("ascii")).hexdigest()[:16]
    return BenchPrompt(first, later_turns, category, fingerprint)


def _user_message(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _is_question(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not all({"role", "content"} <= item.keys() for item in chat) or _is_answer(chat[-1]):
        raise ValueError(_CHAT)
    return chat


_CHAT = 'a list of {"role", "content"} objects, the last of which is not by the assistant'
_Text = Annotated[str, Field(min_length=1)]
_Chat = Annotated[list[dict[str, Any]], Field(min_length=1), AfterValidator(_is_question)]
_Ids = Annotated[list[int], Field(min_length=1)]
_FORMS: dict[str, tuple[str, TypeAdapter[Any]]] = {  # what is expected, and its check
    "prompt": (f"a text, a list of token ids, or {_CHAT}", TypeAdapter(_Text | _Ids | _Chat)),
    "turns": (
        "a list of texts, one for each message of the user",
        TypeAdapter(Annotated[list[_Text], Field(min_length=1)]),
    ),
    "messages": (_CHAT, TypeAdapter(_Chat)),
}
