"""Conversations: their forms, their text by the tokenizer's template, and where responses stand.

Templates rarely mark what the assistant said. What they add when a turn is appended shows it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError

Message = dict[str, str]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}


class Span(NamedTuple):
    """A part of a text: the index of its first character, and of the first one behind it."""

    begin: int
    end: int


def parse_messages(turns: Any, place: str) -> list[Message]:
    """Return the turns of a conversation as `{"role", "content"}`, whichever form they have.

    Raises:
        DataError: a turn is neither `{"role", "content"}` nor `{"from", "value"}`, or nobody
            answers.
    """
    if not isinstance(turns, list):
        raise DataError(
            f"{place} holds no conversation", expected="a list of turns", got=type(turns).__name__
        )
    messages = [_parse_turn(turn, place) for turn in turns]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{place} has no assistant turn, so there is nothing to learn from it",
            expected="at least one turn of the assistant",
            got=", ".join(message["role"] for message in messages) or "no turns",
            remedy="remove the row",
        )
    return messages


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], place: str
) -> tuple[str, tuple[Span, ...]]:
    """Return the conversation as the template writes it, and the spans of the assistant's turns.

    A span is what a turn adds to the text that asks for it (the generation prompt included).

    Raises:
        DataError: the tokenizer has no template, the template refuses the conversation, or it
            rewrites earlier turns when later ones follow.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} is a conversation, but the tokenizer has no chat template",
            expected="a tokenizer with a chat template, or rows with the key text",
            got=type(tokenizer).__name__,
            remedy="set tokenizer.chat_template and save the tokenizer again",
        )
    try:
        text = _apply(tokenizer, messages)
        spans = tuple(_response_spans(tokenizer, messages, text, place))
    except TemplateError as error:
        raise DataError(f"the chat template refuses {place}", got=error) from error
    return text, _require_both_kinds(spans, text, place)


def _response_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str, place: str
) -> Iterator[Span]:
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = _apply(tokenizer, messages[:index], add_generation_prompt=True)
            answered = _apply(tokenizer, messages[: index + 1])
            _require_prefixes(asked, answered, text, place)
            yield Span(len(asked), len(answered))


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    add_generation_prompt: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text


def _require_prefixes(asked: str, answered: str, text: str, place: str) -> None:
    if not (answered.startswith(asked) and text.startswith(answered)):
        raise DataError(
            f"the chat template rewrites earlier turns of {place}, so responses cannot be located",
            expected="a template whose text only grows when a turn is appended",
            got="another beginning after a later turn",
            remedy="split the conversation so that the assistant's turn is the last one",
        )


def _require_both_kinds(spans: tuple[Span, ...], text: str, place: str) -> tuple[Span, ...]:
    num_inside = sum(span.end - span.begin for span in spans)
    if not 0 < num_inside < len(text):
        raise DataError(
            f"the response mask of {place} is the same everywhere",
            expected="a prompt and a response",
            got="no response" if num_inside == 0 else "nothing but response",
            remedy="check the row and the chat template",
        )
    return spans


def _parse_turn(turn: Any, place: str) -> Message:
    fields = turn if isinstance(turn, dict) else {}
    role = fields.get("role", fields.get("from"))
    content = fields.get("content", fields.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{place} has a malformed turn",
            expected='text under "role" and "content", or under "from" and "value"',
            got=repr(turn)[:80],
        )
    return {"role": _ROLES.get(role, role), "content": content}
