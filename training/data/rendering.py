"""Text of conversations by the tokenizer's template, and where the responses stand in it.

Templates rarely mark what the assistant said. What they add when a turn is appended shows it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from training.data.chat import CUT, Chat
from training.data.sources import RowError

# What templates raise on purpose, and what their expressions do on turns they were not made for.
_FAULTS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)

# Some templates write today's date, so that the same data would become other tokens tomorrow.
_CLOCK = "strftime_now"
_STOPPED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{- format"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%m', '07') | replace('%d', '26')"
    " | replace('%b', 'Jul') | replace('%B', 'July') | replace('%A', 'Friday')"
    " | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00') | replace('%S', '00')"
    " -}}{%- endmacro -%}"
)


class Span(NamedTuple):
    """A part of a text: the index of its first character, and of the first one behind it."""

    begin: int
    end: int


class Rendered(NamedTuple):
    """A text that decoding may meet, and its responses."""

    text: str
    responses: tuple[Span, ...]


class _Turn(NamedTuple):
    """The text that asks for a turn, generation prompt included, and the one that ends with it.

    `num_unsaid` characters at the end are those of an end that a cut answer never came to.
    """

    number: int
    asked: str
    answered: str
    num_unsaid: int


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[Rendered]:
    """Return the conversation as the template writes it, with the spans of the assistant's turns.

    A span is what a turn adds to the text that asks for it, thoughts included, and without the end
    that the template sets behind an answer that was cut. That is one text, unless the template
    rewrites earlier turns when later ones follow, as those that forget earlier thoughts do: then
    each turn gets a text of its own, which is what decoding sees.

    Raises:
        DataError: the tokenizer has no template.
        RowError: the template refuses the conversation.
    """
    template = template_of(tokenizer, chat)
    try:
        whole = _apply(tokenizer, template, chat, len(chat.messages))
        turns = [_ask(tokenizer, template, chat, index) for index in chat.answers]
        if all(one.answered.startswith(one.asked) for one in turns) and all(
            whole.startswith(one.answered) for one in turns
        ):
            spans = tuple(Span(len(one.asked), len(one.answered) - one.num_unsaid) for one in turns)
            return [Rendered(whole, spans)]
        return [_alone(tokenizer, template, chat, one) for one in turns]
    except _FAULTS as error:
        raise _refusal(chat, error) from error


def render_question(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the text that asks the assistant for the next turn.

    Raises:
        DataError: the tokenizer has no template.
        RowError: the template refuses the conversation.
    """
    template = template_of(tokenizer, chat)
    try:
        return _apply(tokenizer, template, chat, len(chat.messages), is_asking=True)
    except _FAULTS as error:
        raise _refusal(chat, error) from error


def template_of(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return the template for a conversation; its clock stands still.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{chat.place} is a conversation, but the tokenizer has no chat template",
            expected="a tokenizer with a chat template, or rows with the key text",
            got=type(tokenizer).__name__,
            remedy="set tokenizer.chat_template and save the tokenizer again",
        )
    try:
        template = str(tokenizer.get_chat_template(tools=chat.tools))
    except ValueError as error:  # several named templates, none of them the default
        raise DataError("the tokenizer's chat template cannot be used", got=error) from error
    return _STOPPED_CLOCK + template if _CLOCK in template else template


def _ask(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, index: int) -> _Turn:
    asked = _apply(tokenizer, template, chat, index, is_asking=True)
    answered = _apply(tokenizer, template, chat, index + 1)
    num_unsaid = 0
    if CUT in chat.messages[index]:
        said = chat.messages[index]["content"]
        others = _with_other_answers(tokenizer, template, chat, index, (said + "0", said + "A"))
        num_unsaid = len(answered) - min(_count_shared(answered, other) for other in others)
    return _Turn(index, asked, answered, num_unsaid)


def _alone(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, turn: _Turn) -> Rendered:
    text = turn.answered
    if not text.startswith(turn.asked):  # the answer itself rewrites what comes before it
        begin = _begin_of_answer(tokenizer, template, chat, turn)
        text = turn.asked + turn.answered[begin:]
    return Rendered(text, (Span(len(turn.asked), len(text) - turn.num_unsaid),))


def _begin_of_answer(
    tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, turn: _Turn
) -> int:
    """Return where the text with an answer would go on otherwise, had the answer been another."""
    others = _with_other_answers(tokenizer, template, chat, turn.number, ("0", "A"))
    begin = min(_count_shared(turn.answered, other) for other in others)
    before = turn.answered[:begin]
    # White space that the template sets before an answer is part of it, unless it was asked with.
    space = before[len(before.rstrip()) :]
    return begin - len(space.removeprefix(turn.asked[len(turn.asked.rstrip()) :]))


def _count_shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _with_other_answers(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    chat: Chat,
    index: int,
    contents: tuple[str, str],
) -> list[str]:
    """Return the texts that end with a turn, had it said this; one of two ends or begins unlike."""
    others = ([*chat.messages[:index], chat.messages[index] | {"content": one}] for one in contents)
    return [
        _apply(tokenizer, template, chat._replace(messages=messages), index + 1)
        for messages in others
    ]


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    chat: Chat,
    count: int,
    is_asking: bool = False,
) -> str:
    """Return the text of the first turns."""
    apply: Any = tokenizer.apply_chat_template
    text = apply(
        chat.messages[:count],
        tools=chat.tools,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=is_asking,
    )
    return str(text)


def _refusal(chat: Chat, error: Exception) -> RowError:
    return RowError(
        f"the chat template refuses {chat.place}",
        expected="roles in the order that the template knows",
        got=f"{error} (roles: {', '.join(turn['role'] for turn in chat.messages[:6])})",
        remedy="change the row; where there is no system role, its text can open the first turn",
    )


def gives_offsets(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer says where in a text its tokens stand."""
    return bool(getattr(tokenizer, "is_fast", False))


def encode_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, chat: Rendered, place: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the tokens of a conversation, and which of them are of responses.

    Args:
        tokenizer: any; every border of a response is encoded by itself.
        chat: the text with its responses.
        place: of the row, for messages.

    Raises:
        RowError: a token lies across the border of a response.
    """
    borders = [border for span in chat.responses for border in span]
    texts = [chat.text, *(chat.text[:border] for border in borders)]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ids, *prefixes = encoded
    places = [_length(prefix, ids, tokenizer, place) for prefix in prefixes]
    is_response = np.zeros(len(ids), np.bool_)
    for begin, end in zip(places[::2], places[1::2], strict=True):
        is_response[begin:end] = True
    return np.array(ids, np.int32), is_response


def _length(
    prefix: Sequence[int], ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, place: str
) -> int:
    if list(ids[: len(prefix)]) == list(prefix):
        return len(prefix)
    raise RowError(
        f"cannot tell which tokens of {place} are of responses",
        expected="a tokenizer that says where its tokens stand, or that never joins the end of a "
        "turn with what follows",
        got=f"{type(tokenizer).__name__}, which does neither",
        remedy="put the tokenizer.json of its fast version beside the target, or give rows as "
        "input_ids with loss_mask; data.skip_bad_rows leaves such rows out",
    )
