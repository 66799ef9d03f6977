"""Calls of tools: the grammar that forces one, and how they are found in the text of an answer."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from inference.sampling.grammar import WHITESPACE, GrammarSource

_OPEN, _CLOSE, _PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_MARK = re.compile(f"{_OPEN}|{re.escape(_PYTHON_TAG)}")
_BEFORE_OBJECT = re.compile(rf"(?:{re.escape(_PYTHON_TAG)})?\s*")
_BETWEEN_CALLS = "; \t\n"
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON

    @property
    def data(self) -> dict[str, Any]:
        """The call with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def grammar_of_call(
    tools: Sequence[Mapping[str, Any]], names: Collection[str], tokenizer: PreTrainedTokenizerBase
) -> GrammarSource:
    """Return the grammar of a call of one of the named functions, in the template's form."""
    is_tagged = _OPEN in tokenizer.get_chat_template(tools=[*map(dict, tools)])
    key = "arguments" if is_tagged else "parameters"
    calls = list[str]()
    for function in (tool["function"] for tool in tools):
        if function["name"] in names:
            # Each schema is a document of its own, to whose definitions its references point.
            schema = {"type": "object", **(function.get("parameters") or {})}
            schema |= {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            before = json.dumps(f'{{"name": "{function["name"]}", "{key}": ')
            calls.append(f'{before} %json {json.dumps(schema)} "}}"')
    start = f'"{_OPEN}\\n" call "\\n{_CLOSE}"' if is_tagged else "call"
    return f"start: {start}\ncall: {' | '.join(calls)}"


class ToolCallParser:
    """Separates the calls of tools from the text of an answer, which is pushed piece by piece.

    There are two forms of calls: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes,
    Qwen); and, at the beginning of an answer, objects with `name` and `parameters` (Llama 3), also
    after `<|python_tag|>`. All else is text, also calls of unknown functions. Text that may become
    a call is held back.

    Args:
        names: names of the functions.
        most: largest number of calls; further ones are left out. None for any number.
    """

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self.num_calls = 0
        self._names, self._most = frozenset(names), most
        self._held = ""
        self._has_text = False  # whether there is any text apart from calls

    def push(self, text: str, *, is_end: bool = False) -> tuple[str, list[ToolCall]]:
        """Return the text that is no part of a call, and the calls that are complete."""
        self._held += text
        texts, calls = list[str](), list[ToolCall]()
        while (start := self._start()) is not None:
            if (block := self._block(start, is_end)) is None:
                break
            before, self._held = self._held[:start], self._held[start + len(block) :]
            call = self._call(block)
            if call is None:
                before += block
            elif self._most is None or self.num_calls < self._most:
                self.num_calls += 1
                calls.append(call)
            texts.append(self._text(before if call is None else before.rstrip(_BETWEEN_CALLS)))
        count = len(self._held) if is_end else self._num_final(start)
        texts.append(self._text(self._held[:count]))
        self._held = self._held[count:]
        return "".join(texts), calls

    def _text(self, text: str) -> str:
        self._has_text |= bool(text.strip())
        return text

    def _start(self) -> int | None:
        """Return where the next call may begin; None if no call has begun."""
        first = len(self._held) - len(self._held.lstrip(_BETWEEN_CALLS))
        if not self._has_text and self._held.startswith("{", first):
            return first
        mark = _MARK.search(self._held)
        return None if mark is None else mark.start()

    def _block(self, start: int, is_end: bool) -> str | None:
        """Return what may be a call as a whole; None if it may still go on."""
        held, end = self._held, -1
        if held.startswith(_OPEN, start):
            if (end := held.find(_CLOSE, start)) >= 0:
                end += len(_CLOSE)
        else:
            begin = _BEFORE_OBJECT.match(held, start).end()  # type: ignore[union-attr]
            if begin < len(held) and held[begin] != "{":
                return held[start:begin]
            with suppress(ValueError, RecursionError):
                _, end = _DECODER.raw_decode(held, begin)
        if end < 0:
            return held[start:] if is_end else None
        return held[start:end]

    def _num_final(self, start: int | None) -> int:
        """Return the number of characters that cannot be before or within a call."""
        if start is None:
            last = self._held.rfind("<")
            is_mark = any(mark.startswith(self._held[last:]) for mark in (_OPEN, _PYTHON_TAG))
            start = last if last >= 0 and is_mark else len(self._held)
        return len(self._held[:start].rstrip(_BETWEEN_CALLS))

    def _call(self, block: str) -> ToolCall | None:
        inner = block.removeprefix(_OPEN).removesuffix(_CLOSE).removeprefix(_PYTHON_TAG)
        try:
            data = json.loads(inner)
        except (ValueError, RecursionError):
            return None
        if not isinstance(data, dict) or str(data.get("name")) not in self._names:
            return None
        default: object = {} if block.startswith(_OPEN) else None
        arguments = data.get("arguments", data.get("parameters", default))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(data["name"], arguments) if isinstance(arguments, str) else None
