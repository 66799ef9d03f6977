"""Parser of conversations with turns `{"role", "content"}` or `{"from", "value"}` (ShareGPT)."""

import json
from typing import Any, NamedTuple

from training.data.sources import Record, RecordError

Message = dict[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}

# The key with which `jakiro regenerate` and `jakiro synthesize` mark a turn or a text whose end is
# missing.
CUT = "is_cut"

# The key of an answer with weight 0, from which nothing is learned; other names mean the same.
WEIGHT = "weight"
_WEIGHTS = (WEIGHT, "train", "loss")

# The role of the system's turn, and the key of its text in some records of conversations.
SYSTEM = "system"

# Keys of a turn that templates may read in addition to its role and content.
_MORE = ("name", "reasoning_content", "thinking", "tool_call_id", "tool_calls")


class Chat(NamedTuple):
    """A conversation as chat templates read it, and its location in the data."""

    messages: list[Message]
    tools: list[Any] | None
    location: str

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's turns that are learned.

        A turn that begins the conversation, or has the weight 0, is not.
        """
        return [index for index in self._turns if WEIGHT not in self.messages[index]]

    @property
    def num_unlearned(self) -> int:
        """The number of the assistant's turns with the weight 0."""
        return len(self._turns) - len(self.answers)

    @property
    def _turns(self) -> list[int]:
        return [n for n, turn in enumerate(self.messages) if n and turn["role"] == "assistant"]


def chat_of(record: Record, key: str, *, may_ask: bool = False) -> Chat:
    """Return the conversation of a record.

    Args:
        may_ask: whether the conversation may have no answer, but only a question.
        record: a record with turns, and possibly with tools. A text under `system` is the system's
            turn, unless the turns begin with one.
    """
    fields = record.fields
    chat = parse_chat(fields[key], fields.get("tools"), record.location, may_ask=may_ask)
    system = fields.get(SYSTEM)
    if not isinstance(system, str) or not system or chat.messages[0]["role"] == SYSTEM:
        return chat
    return chat._replace(messages=[{"role": SYSTEM, "content": system}, *chat.messages])


def parse_chat(turns: Any, tools: Any, location: str, *, may_ask: bool = False) -> Chat:
    """Return the conversation of a record, in either form of turns.

    Args:
        turns: turns of the record, as `{"role", "content"}` or `{"from", "value"}`. The content may
            be a list of text parts, and it may be missing from a turn with tool calls.
        may_ask: see `chat_of`.
    """
    if not isinstance(turns, list):
        raise RecordError(
            f"{location} contains no conversation",
            expected="a list of turns",
            got=type(turns).__name__,
        )
    messages = [_parse_turn(turn, location) for turn in turns]
    chat = Chat(messages, _parse_tools(tools, location), location)
    if not (chat._turns or (may_ask and messages and messages[-1]["role"] == "user")):
        raise RecordError(
            f"{location} has no assistant turn after its first turn, so there is nothing to learn",
            expected="an assistant turn that follows another turn",
            got=", ".join(message["role"] for message in chat.messages) or "no turns",
            remedy="remove the record",
        )
    return chat


def _parse_turn(turn: Any, location: str) -> Message:
    fields = turn if isinstance(turn, dict) else {}
    role, content = (_only(fields, names) for names in (("role", "from"), ("content", "value")))
    more = {name: fields[name] for name in _MORE if fields.get(name) is not None}
    if fields.get("reasoning") is not None:  # another name that servers give it
        more.setdefault("reasoning_content", fields["reasoning"])
    if isinstance(content, list):
        content = _joined(content)
    is_call = content is None and "tool_calls" in more
    if not isinstance(role, str) or not (isinstance(content, str) or is_call):
        raise RecordError(
            f"{location} has a malformed turn",
            expected='text under "role" and "content", or under "from" and "value"',
            got=repr(turn)[:80],
        )
    text = {} if content is None else {"content": content}
    cut = {CUT: True} if content is not None and fields.get(CUT) is True else {}
    weight = {WEIGHT: 0} if any(fields.get(name) == 0 for name in _WEIGHTS) else {}
    return {"role": _ROLES.get(role, role), **text, **more, **cut, **weight}


def with_objects(turns: list[Message]) -> list[Message]:
    """Return turns in which the arguments of tool calls are objects, as templates expect them."""
    return [
        turn | {"tool_calls": [_with_object(call) for call in turn["tool_calls"]]}
        if isinstance(turn.get("tool_calls"), list)
        else turn
        for turn in turns
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": function | {"arguments": arguments}}


def _only(fields: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the only value under any of the names; None if there are several values or none."""
    values = [fields[name] for name in names if fields.get(name) is not None]
    return values[0] if len(values) == 1 else None


def _joined(parts: list[Any]) -> str | None:
    """Return the joined text of the parts; None if any part has no text."""
    given = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [text for text in given if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _parse_tools(tools: Any, location: str) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            tools = {}
    if not tools and tools != {}:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(
            f"{location} has malformed tools", expected="a list of objects", got=repr(tools)[:80]
        )
    return tools
