"""Conversations: parsed from records, and rendered with the chat template, with response spans.

Because templates rarely mark the responses, a response is defined as the text that the template
adds when an assistant turn is appended.
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.generation.prompts import TEMPLATE_ERRORS
from jakiro.errors import DataError
from jakiro.utils.token_text import common_length
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

# Some templates call this function to write today's date. It is replaced by a macro with a fixed
# date, because otherwise the same data would be encoded differently every day.
_CLOCK = "strftime_now"
_STOPPED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{- format"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%m', '07') | replace('%d', '26')"
    " | replace('%b', 'Jul') | replace('%B', 'July') | replace('%A', 'Friday')"
    " | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00') | replace('%S', '00')"
    " -}}{%- endmacro -%}"
)

# A tag at the end of a question that opens reasoning, and one that closes it.
_OPENING = re.compile(r"(<think(?:ing)?>|\[THINK\])\s*$")
_CLOSING = re.compile(r"</think(?:ing)?>|\[/THINK\]")
_USER_TEXT = "What the user writes"


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
    values = [fields[name] for name in names if fields.get(name) is not None]
    return values[0] if len(values) == 1 else None


def _join(parts: list[Any]) -> str | None:
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


class Span(NamedTuple):
    """A part of a text: the indices of its first character and of the first character after it."""

    begin: int
    end: int


class Rendered(NamedTuple):
    """The text of a conversation as the target reads it in decoding, with the responses' spans."""

    text: str
    responses: tuple[Span, ...]


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[Rendered]:
    """Return the texts of a conversation, with the spans of the responses.

    A span is the text that an assistant turn adds, including reasoning, but without the end marker
    after an answer that was cut off. The result is a single text unless the template rewrites
    earlier turns when later turns follow, for example by dropping earlier reasoning. In that case,
    the result has one text for each assistant turn: the text that the target reads and writes in
    decoding, up to the end of this turn. The same holds if the template leaves out a part of the
    content, such as its reasoning, or adds reasoning to an answer that was cut off: the span is
    then the content itself and, unless it was cut off, the end marker.
    """
    template = _Template(tokenizer, chat)
    whole = template.text(chat.messages)
    answers = [
        _Answer(template, chat.messages[:index], chat.messages[index]) for index in chat.answers
    ]
    if all(answer.is_part_of(whole) for answer in answers):
        return [Rendered(whole, tuple(answer.added for answer in answers))]
    return [answer.alone() for answer in answers]


def render_question(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the text after which the target generates the next assistant turn."""
    return _Template(tokenizer, chat).text(chat.messages, is_asking=True)


def render_user_opening(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the text up to the point where the content of the user's next turn begins."""
    turn = {"role": "user", "content": _USER_TEXT}
    text = _Template(tokenizer, chat).text([*chat.messages, turn])
    opening, found, _ = text.rpartition(_USER_TEXT)
    if not found:
        raise DataError("the chat template omits the user's text", got=text[:80])
    return opening


class _Template:
    """The chat template for a conversation, with a fixed date."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: Chat) -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                f"{chat.location} is a conversation, but the tokenizer has no chat template",
                expected='a tokenizer with a chat template, or records with the key "text"',
                got=type(tokenizer).__name__,
                remedy="set tokenizer.chat_template and save the tokenizer again",
            )
        template = str(tokenizer.get_chat_template(tools=chat.tools))
        self._location = chat.location
        self._apply = partial(
            tokenizer.apply_chat_template,
            tools=chat.tools,
            chat_template=_STOPPED_CLOCK + template if _CLOCK in template else template,
            tokenize=False,
        )

    def text(self, messages: Sequence[Message], *, is_asking: bool = False) -> str:
        apply = partial(self._apply, add_generation_prompt=is_asking)
        try:
            try:
                return str(apply(_with_objects(messages)))
            except TypeError:  # a few templates expect the arguments of calls as JSON
                return str(apply(list(messages)))
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages[:6])
            raise RecordError(
                f"the chat template rejects {self._location}",
                expected="roles in an order that the template accepts",
                got=f"{error} (roles: {roles})",
                remedy="change the record; if the template has no system role, put the system text "
                "at the beginning of the first user turn",
            ) from error


class _Answer:
    """An assistant turn, with the texts up to its beginning and up to its end.

    Attributes:
        asked: text before the turn, including the generation prompt.
        answered: text up to the end of the turn.
        added: span that the turn adds to `asked`, without the end marker if it was cut off.
        said: text of the turn if the template does not write the content as it is; None otherwise.
    """

    def __init__(self, template: _Template, before: list[Message], message: Message) -> None:
        self._template = template
        self._before = before
        self._message = message
        self.asked = template.text(before, is_asking=True)
        self.answered = template.text([*before, message])
        end = len(self.answered)
        if CUT in message:
            end = self._end_of_common_text(message["content"] + "0", message["content"] + "A")
        self.added = Span(len(self.asked), end)
        self.said = self._content_if_changed()

    def is_part_of(self, whole: str) -> bool:
        is_appended = self.answered.startswith(self.asked) and whole.startswith(self.answered)
        return self.said is None and is_appended

    def alone(self) -> Rendered:
        if self.said is None:
            return self._as_rendered()
        text = self.asked + self.said
        return Rendered(text, (Span(len(self.asked), len(text)),))

    def _as_rendered(self) -> Rendered:
        text = self.answered
        if not text.startswith(self.asked):  # the answer changes the rendered text before it
            text = self.asked + text[self._begin() :]
        end = len(text) - (len(self.answered) - self.added.end)
        return Rendered(text, (Span(len(self.asked), end),))

    def _content_if_changed(self) -> str | None:
        """Return the text of the turn if the template does not write its content as it is."""
        message = self._message
        said = _as_said(message, self.asked) if message.get("content") else ""
        if not _squeeze(said):
            return None
        text, (span,) = self._as_rendered()
        before, found, _ = _squeeze(text[slice(*span)]).partition(_squeeze(said))
        is_added = CUT in message and not _reasoning_of(message) and _CLOSING.search(before)
        if found and not is_added:
            return None
        one, other = self._with_contents("0", "A")
        if one == other:  # the template writes no contents at all
            return None
        return said if CUT in message else said + one[common_length(one, other) + 1 :]

    def _begin(self) -> int:
        """Return the index of the first character that depends on the content of the answer."""
        begin = self._end_of_common_text("0", "A")
        before = self.answered[:begin]
        # White space before an answer belongs to the answer, unless the generation prompt ends with
        # that white space.
        space = before[len(before.rstrip()) :]
        return begin - len(space.removeprefix(self.asked[len(self.asked.rstrip()) :]))

    def _end_of_common_text(self, one: str, other: str) -> int:
        """Return the length of the text that does not change with either of two other contents.

        The two contents differ in one character, so at least one of them differs from the actual
        content at that character.
        """
        others = self._with_contents(one, other)
        return min(common_length(self.answered, text) for text in others)

    def _with_contents(self, *contents: str) -> list[str]:
        """Return the text up to the end of the turn with each of other contents."""
        turns = (self._message | {"content": content} for content in contents)
        return [self._template.text([*self._before, turn]) for turn in turns]


def _as_said(message: Message, asked: str) -> str:
    """Return what the target says after a question, which may end with a tag that opens reasoning.

    Reasoning beside the content is a part of it only if there is such a tag.
    """
    content, reasoning = str(message["content"]), _reasoning_of(message)
    opening = _OPENING.search(asked)
    if opening is None:
        return content
    if reasoning:
        closing = opening[1].replace("<", "</").replace("[", "[/")
        return f"{reasoning.strip()}\n{closing}\n\n{content}"
    without = content.lstrip().removeprefix(opening[1])
    return without.lstrip() if len(without) < len(content.lstrip()) else content


def _reasoning_of(message: Message) -> str:
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return reasoning if isinstance(reasoning, str) else ""


def _squeeze(text: str) -> str:
    """Return a text without white space, which templates may add and remove."""
    return "".join(text.split())


def _with_objects(turns: Sequence[Message]) -> list[Message]:
    """Return turns in which the arguments of tool calls are objects, as templates expect them."""
    return [
        turn | {"tool_calls": [_with_object(call) for call in turn["tool_calls"]]}
        if isinstance(turn.get("tool_calls"), list)
        else turn
        for turn in turns
    ]


def _with_object(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (LookupError, TypeError, ValueError):  # a call of another form, or without JSON
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": call["function"] | {"arguments": arguments}}
