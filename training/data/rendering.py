"""Rendering of conversations with the tokenizer's chat template, and the spans of responses.

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
from jakiro.utils.sequences import common_length
from training.data.chat import CUT, Chat, Message
from training.data.sources import RecordError

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
    """Return the text up to the point where the content of the user's next turn begins.

    Args:
        chat: conversation so far, which ends with an answer or is empty.
    """
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
        """Return the text of messages, with a generation prompt if `is_asking`."""
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
        """Return whether the text up to the end of the turn is the beginning of a longer text."""
        is_appended = self.answered.startswith(self.asked) and whole.startswith(self.answered)
        return self.said is None and is_appended

    def alone(self) -> Rendered:
        """Return the text that the target reads and writes up to the end of this turn."""
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
        if not _squeezed(said):
            return None
        text, (span,) = self._as_rendered()
        before, found, _ = _squeezed(text[slice(*span)]).partition(_squeezed(said))
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
    """Return the reasoning beside the content of a turn; empty if there is none."""
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return reasoning if isinstance(reasoning, str) else ""


def _squeezed(text: str) -> str:
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
