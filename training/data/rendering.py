"""Rendering of conversations with the tokenizer's chat template, and the spans of responses.

Because templates rarely mark the responses, a response is defined as the text that the template
adds when an assistant turn is appended.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from jakiro.utils.chat_templates import TEMPLATE_ERRORS, apply_chat_template
from jakiro.utils.sequences import common_length
from training.data.chat import CUT, Chat, Message, with_objects
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


class Span(NamedTuple):
    """A part of a text: the indices of its first character and of the first character after it."""

    begin: int
    end: int


class Rendered(NamedTuple):
    """The text of a conversation as the target reads it in decoding, with the responses' spans."""

    text: str
    responses: tuple[Span, ...]


class _Turn(NamedTuple):
    """The rendered texts up to the beginning and up to the end of an assistant turn.

    Attributes:
        asked: text before the turn, including the generation prompt.
        answered: text up to the end of the turn.
        num_unsaid: number of characters of the end marker at the end of `answered` if the answer
            was cut off; otherwise 0.
        said: text of the turn if the template does not write the content as it is; None otherwise.
    """

    number: int
    asked: str
    answered: str
    num_unsaid: int
    said: str | None


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
    template = template_of(tokenizer, chat)
    try:
        whole = _apply(tokenizer, template, chat, len(chat.messages))
        turns = [_ask(tokenizer, template, chat, index) for index in chat.answers]
        if all(
            turn.said is None
            and turn.answered.startswith(turn.asked)
            and whole.startswith(turn.answered)
            for turn in turns
        ):
            spans = (Span(len(turn.asked), len(turn.answered) - turn.num_unsaid) for turn in turns)
            return [Rendered(whole, tuple(spans))]
        return [_alone(tokenizer, template, chat, turn) for turn in turns]
    except TEMPLATE_ERRORS as error:
        raise _refusal(chat, error) from error


def render_question(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the text after which the target generates the next assistant turn."""
    template = template_of(tokenizer, chat)
    try:
        return _apply(tokenizer, template, chat, len(chat.messages), is_asking=True)
    except TEMPLATE_ERRORS as error:
        raise _refusal(chat, error) from error


def render_user_opening(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the text up to the point where the content of the user's next turn begins.

    Args:
        chat: conversation so far, which ends with an answer or is empty.
    """
    template = template_of(tokenizer, chat)
    longer = chat._replace(messages=[*chat.messages, {"role": "user", "content": _USER_TEXT}])
    try:
        text = _apply(tokenizer, template, longer, len(longer.messages))
    except TEMPLATE_ERRORS as error:
        raise _refusal(longer, error) from error
    opening, found, _ = text.rpartition(_USER_TEXT)
    if not found:
        raise DataError(
            "the chat template omits the user's text",
            expected="a template that writes the content of every user turn",
            got=text[:80],
            remedy="set another chat template and save the tokenizer again",
        )
    return opening


def template_of(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the chat template for a conversation, with a fixed date."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{chat.location} is a conversation, but the tokenizer has no chat template",
            expected='a tokenizer with a chat template, or records with the key "text"',
            got=type(tokenizer).__name__,
            remedy="set tokenizer.chat_template and save the tokenizer again",
        )
    try:
        template = str(tokenizer.get_chat_template(tools=chat.tools))
    except ValueError as error:  # there are several named templates, but no default
        raise DataError("the tokenizer's chat template cannot be used", got=error) from error
    return _STOPPED_CLOCK + template if _CLOCK in template else template


def _ask(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, index: int) -> _Turn:
    asked = _apply(tokenizer, template, chat, index, is_asking=True)
    answered = _apply(tokenizer, template, chat, index + 1)
    num_unsaid = 0
    if CUT in chat.messages[index]:
        said = chat.messages[index]["content"]
        others = _with_other_answers(tokenizer, template, chat, index, (said + "0", said + "A"))
        num_unsaid = len(answered) - min(common_length(answered, other) for other in others)
    turn = _Turn(index, asked, answered, num_unsaid, None)
    return turn._replace(said=_verbatim(tokenizer, template, chat, turn))


def _verbatim(
    tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, turn: _Turn
) -> str | None:
    """Return the text of a turn whose content the template does not write as it is, or None."""
    message = chat.messages[turn.number]
    if not message.get("content"):
        return None
    text, (span,) = _alone(tokenizer, template, chat, turn)
    said = _said(message, turn.asked)
    if not (wanted := _squeezed(said)):
        return None
    before, found, _ = _squeezed(text[slice(*span)]).partition(wanted)
    is_added = CUT in message and not _reasoning_of(message) and _CLOSING.search(before)
    if found and not is_added:
        return None
    one, other = _with_other_answers(tokenizer, template, chat, turn.number, ("0", "A"))
    if one == other:  # the template writes no contents at all
        return None
    return said if CUT in message else said + one[common_length(one, other) + 1 :]


def _said(message: Message, asked: str) -> str:
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


def _alone(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, turn: _Turn) -> Rendered:
    if turn.said is not None:
        text = turn.asked + turn.said
        return Rendered(text, (Span(len(turn.asked), len(text)),))
    text = turn.answered
    if not text.startswith(turn.asked):  # the answer changes the rendered text before it
        begin = _begin_of_answer(tokenizer, template, chat, turn)
        text = turn.asked + turn.answered[begin:]
    return Rendered(text, (Span(len(turn.asked), len(text) - turn.num_unsaid),))


def _squeezed(text: str) -> str:
    """Return a text without white space, which templates may add and remove."""
    return "".join(text.split())


def _begin_of_answer(
    tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, turn: _Turn
) -> int:
    """Return the index of the first character that depends on the content of the answer."""
    others = _with_other_answers(tokenizer, template, chat, turn.number, ("0", "A"))
    begin = min(common_length(turn.answered, other) for other in others)
    before = turn.answered[:begin]
    # White space before an answer belongs to the answer, unless the generation prompt ends with
    # that white space.
    space = before[len(before.rstrip()) :]
    return begin - len(space.removeprefix(turn.asked[len(turn.asked.rstrip()) :]))


def _with_other_answers(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    chat: Chat,
    index: int,
    contents: tuple[str, str],
) -> list[str]:
    """Return the text up to the end of turn `index` with each of `contents` as its content.

    The two contents differ in one character, so at least one of the returned texts differs from the
    actual text at that character.
    """
    turn = chat.messages[index]
    others = ([*chat.messages[:index], turn | {"content": content}] for content in contents)
    return [
        _apply(tokenizer, template, chat._replace(messages=messages), index + 1)
        for messages in others
    ]


_USER_TEXT = "What the user writes"


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    chat: Chat,
    count: int,
    is_asking: bool = False,
) -> str:
    """Return the text of the first `count` turns, with a generation prompt if `is_asking`."""
    apply = partial(
        apply_chat_template,
        tokenizer,
        tools=chat.tools,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=is_asking,
    )
    turns = chat.messages[:count]
    try:
        return str(apply(with_objects(turns)))
    except TypeError:  # a few templates expect the arguments of calls as JSON
        return str(apply(turns))


def _refusal(chat: Chat, error: Exception) -> RecordError:
    return RecordError(
        f"the chat template rejects {chat.location}",
        expected="roles in an order that the template accepts",
        got=f"{error} (roles: {', '.join(turn['role'] for turn in chat.messages[:6])})",
        remedy="change the record; if the template has no system role, put the system text at the "
        "beginning of the first user turn",
    )


def gives_offsets(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer reports the character offsets of its tokens."""
    return bool(getattr(tokenizer, "is_fast", False))


def encode_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, chat: Rendered, location: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the tokens of a conversation, and whether each token belongs to a response.

    The text up to each border of a response is encoded separately, so the tokenizer need not report
    offsets.
    """
    borders = [border for span in chat.responses for border in span]
    texts = [chat.text, *(chat.text[:border] for border in borders)]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ids, *prefixes = encoded
    indices = [_length(prefix, ids, tokenizer, location) for prefix in prefixes]
    is_response = np.zeros(len(ids), np.bool_)
    for begin, end in zip(indices[::2], indices[1::2], strict=True):
        is_response[begin:end] = True
    return np.array(ids, np.int32), is_response


def _length(
    prefix: Sequence[int], ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, location: str
) -> int:
    if list(ids[: len(prefix)]) == list(prefix):
        return len(prefix)
    raise RecordError(
        f"cannot determine which tokens of {location} belong to responses",
        expected="a tokenizer that reports the offsets of its tokens, or whose tokens never span "
        "the beginning or end of a response",
        got=f"{type(tokenizer).__name__}, which reports no offsets and has a token "
        "that spans the beginning or end of a response",
        remedy="put the tokenizer.json of a fast tokenizer into the target's folder, or provide "
        "the records as input_ids with loss_mask",
    )
