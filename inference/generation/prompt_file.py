"""Prompt files: texts, token ids, chats, and dialogues of several chat turns."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

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


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") == "assistant"


def _is_question(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not all({"role", "content"} <= item.keys() for item in chat) or _is_answer(chat[-1]):
        raise ValueError("messages have a role and content, and the assistant is not the last one")
    return chat


_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Chat = Annotated[list[dict[str, Any]], Field(min_length=1), AfterValidator(_is_question)]


class _Line(BaseModel):
    """The object in a line of a file, whose other keys are ignored."""

    model_config = ConfigDict(strict=True)

    prompt: _Text | _Ids | _Chat | None = None
    turns: _Texts | None = None
    messages: _Chat | None = None
    category: str = "all"

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "_Line":
        if sum(given is not None for given in (self.prompt, self.turns, self.messages)) != 1:
            raise ValueError("exactly one of the keys prompt, turns and messages is needed")
        return self


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
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompts in {path} as UTF-8", got=error) from error
    numbered = ((n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip())
    prompts = []
    for number, text in islice(numbered, max_prompts):
        if path.suffix in _JSON:
            prompts.append(_parse(text, f"{path}:{number}", training_records))
        else:
            prompts.append(prompt_of(text.removesuffix("\r")))
    if not prompts:
        raise PromptError(f"{path} holds no prompts", expected="one prompt per line")
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


def prompt_of(
    first: Prompt, category: str = "all", later_turns: tuple[str, ...] = ()
) -> BenchPrompt:
    content = json.dumps([first, later_turns], sort_keys=True)
    fingerprint = hashlib.sha256(content.encode("ascii")).hexdigest()[:16]
    return BenchPrompt(first, later_turns, category, fingerprint)


def _parse(text: str, location: str, is_training_record: bool) -> BenchPrompt:
    try:
        fields = json.loads(text)
        if is_training_record:
            fields = _without_answer(fields)
        line = _Line.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        got = ": ".join([*map(str, first["loc"][:1]), first["msg"].removeprefix("Value error, ")])
        raise PromptError(
            f"{location} has no usable prompt",
            expected="prompt (a text, token ids, or a chat), turns (texts), or messages (a chat)",
            got=got,
        ) from error
    except ValueError as error:
        raise PromptError(
            f"{location} is not JSON",
            got=error,
            remedy="rename the file to .txt if its lines are plain text",
        ) from error
    if line.turns is not None:
        return prompt_of([_user_message(line.turns[0])], line.category, tuple(line.turns[1:]))
    return prompt_of(line.prompt or line.messages or "", line.category)


def _without_answer(fields: Any) -> Any:
    """Return a record of training data as a prompt: its text, or its chat without the answer."""
    if not isinstance(fields, dict):
        return fields
    if "text" in fields:
        fields.setdefault("prompt", fields.pop("text"))
    for key in ("prompt", "messages"):
        messages: Any = fields.get(key)
        while isinstance(messages, list) and messages and _is_answer(messages[-1]):
            fields[key] = messages = messages[:-1]
    return fields


def _user_message(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}
