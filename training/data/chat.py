"""Conversations: their forms, and what their turns are.

Both `{"role", "content"}` and ShareGPT's `{"from", "value"}` are read.
"""

import json
from typing import Any, NamedTuple

from training.data.sources import RowError

Message = dict[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}

# Under this key `jakiro regenerate` says that the end of a turn or text is missing.
CUT = "is_cut"

# What templates may read of a turn beside its role and content.
_MORE = ("name", "reasoning_content", "thinking", "tool_call_id", "tool_calls")


class Chat(NamedTuple):
    """A conversation as chat templates take it, and where it comes from."""

    messages: list[Message]
    tools: list[Any] | None
    place: str

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's turns; what nobody asked for is no answer."""
        return [n for n, turn in enumerate(self.messages) if n and turn["role"] == "assistant"]


def parse_chat(turns: Any, tools: Any, place: str) -> Chat:
    """Return a conversation, whichever form its turns have.

    Args:
        turns: of the row, as `{"role", "content"}` or `{"from", "value"}`; a content may be a list
            of text parts, and lack where there are tool calls.
        tools: that the assistant may call, as a list or as JSON, or None.
        place: for messages.

    Raises:
        RowError: a turn has neither form, or nobody answers.
    """
    if not isinstance(turns, list):
        raise RowError(
            f"{place} holds no conversation", expected="a list of turns", got=type(turns).__name__
        )
    chat = Chat([_parse_turn(turn, place) for turn in turns], _parse_tools(tools, place), place)
    if not chat.answers:
        raise RowError(
            f"{place} has no assistant turn that answers, so there is nothing to learn from it",
            expected="at least one turn of the assistant after another one",
            got=", ".join(message["role"] for message in chat.messages) or "no turns",
            remedy="remove the row",
        )
    return chat


def _parse_turn(turn: Any, place: str) -> Message:
    fields = turn if isinstance(turn, dict) else {}
    role, content = (_only(fields, names) for names in (("role", "from"), ("content", "value")))
    more = {name: fields[name] for name in _MORE if fields.get(name) is not None}
    if isinstance(content, list):
        content = _joined(content)
    is_call = content is None and "tool_calls" in more
    if not isinstance(role, str) or not (isinstance(content, str) or is_call):
        raise RowError(
            f"{place} has a malformed turn",
            expected='text under "role" and "content", or under "from" and "value"',
            got=repr(turn)[:80],
        )
    spoken = {} if content is None else {"content": content}
    cut = {CUT: True} if content is not None and fields.get(CUT) is True else {}
    return {"role": _ROLES.get(role, role), **spoken, **more, **cut}


def _only(fields: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the one value that is there under any of the names; None if there are several."""
    values = [fields[name] for name in names if fields.get(name) is not None]
    return values[0] if len(values) == 1 else None


def _joined(parts: list[Any]) -> str | None:
    """Return the text of parts, or None if there is anything else among them."""
    given = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [text for text in given if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _parse_tools(tools: Any, place: str) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            tools = {}
    if not tools and tools != {}:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"{place} has malformed tools", expected="a list of objects", got=repr(tools)[:80]
        )
    return tools
