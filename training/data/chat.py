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
        """The indices of the assistant's turns that are learned: those without the weight 0."""
        return [index for index in self.turns if WEIGHT not in self.messages[index]]

    @property
    def num_unlearned(self) -> int:
        """The number of the assistant's turns with the weight 0."""
        return len(self.turns) - len(self.answers)

    @property
    def turns(self) -> list[int]:
        """The indices of the assistant's turns, except one that begins the conversation."""
        return [n for n, turn in enumerate(self.messages) if n and turn["role"] == "assistant"]


def chat_of(record: Record, key: str, *, may_ask: bool = False) -> Chat:
    """Return the conversation of a record, in either form of turns.

    Args:
        record: a record with turns, and possibly with tools. A text under `system` is the system's
            turn, unless the turns begin with one. The content of a turn may be a list of text
            parts, and it may be missing from a turn with tool calls.
        may_ask: whether the conversation may have no answer, but only a question.
    """
    turns, location = record.fields[key], record.location
    if not isinstance(turns, list):
        raise RecordError(
            f"{location} contains no conversation",
            expected="a list of turns",
            got=type(turns).__name__,
        )
    messages = [_parse_turn(turn, location) for turn in turns]
    chat = Chat(messages, _parse_tools(record.fields.get("tools"), location), location)
    if not (chat.turns or (may_ask and messages and messages[-1]["role"] == "user")):
        raise RecordError(
            f"{location} has no assistant turn after its first turn, so there is nothing to learn",
            got=", ".join(message["role"] for message in messages) or "no turns",
            remedy="remove the record",
        )
    system = record.fields.get(SYSTEM)
    if isinstance(system, str) and system and messages[0]["role"] != SYSTEM:
        messages.insert(0, {"role": SYSTEM, "content": system})
    return chat


def _parse_turn(turn: Any, location: str) -> Message:
    fields = turn if isinstance(turn, dict) else {}
    role, content = (_only(fields, names) for names in (("role", "from"), ("content", "value")))
    more = {name: fields[name] for name in _MORE if fields.get(name) is not None}
    if fields.get("reasoning") is not None:  # another name that servers give it
        more.setdefault("reasoning_content", fields["reasoning"])
    if isinstance(content, list):
        content = _join(content)
    is_call = content is None and "tool_calls" in more
    if not isinstance(role, str) or not (isinstance(content, str) or is_call):
        raise RecordError(
            f"{location} has a malformed turn",
            expected='text under "role" and "content", or under "from" and "value"',
            got=repr(turn)[:80],
        )
    message: Message = {"role": _ROLES.get(role, role)}
    if content is not None:
        message["content"] = content
    message |= more
    if content is not None and fields.get(CUT) is True:
        message[CUT] = True
    if any(fields.get(name) == 0 for name in _WEIGHTS):
        message[WEIGHT] = 0
    return message


def _only(fields: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the only value under any of the names; None if there are several values or none."""
    values = [fields[name] for name in names if fields.get(name) is not None]
    return values[0] if len(values) == 1 else None


def _join(parts: list[Any]) -> str | None:
    """Return the text of all parts; None if any part has no text."""
    try:
        return "".join(part["text"] for part in parts)
    except (LookupError, TypeError):
        return None


def _parse_tools(tools: Any, location: str) -> list[Any] | None:
    try:
        if isinstance(tools, str):
            tools = json.loads(tools) if tools.strip() else None
        values = [] if tools is None else tools
        if isinstance(values, list) and all(isinstance(tool, dict) for tool in values):
            return values or None
    except ValueError:
        pass
    raise RecordError(
        f"{location} has malformed tools", expected="a list of objects", got=repr(tools)[:80]
    )
