"""Dialogues that regenerate a record answer by answer; each question contains all turns so far."""

from collections.abc import Generator
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jakiro.utils.token_text import REPLACEMENT, text_of_tokens
from training.data.chat import CUT, Chat, chat_of
from training.data.documents import FORMS, form_of, read_tokens
from training.data.rendering import render_question
from training.data.sources import Record, RecordError


class Answer(NamedTuple):
    """An answer of the target; `is_cut` is true if it reached the length limit before its end."""

    token_ids: list[int]
    text: str
    is_cut: bool


# Keys that the new record does not take over from the old one.
_REPLACED = {*FORMS, "tools", "loss_mask", "record", CUT}

# Yields the token ids of each question, receives the answer, and returns the new record.
RecordDialogue = Generator[list[int], Answer, dict[str, Any]]


def dialogue_over(
    record: Record, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> RecordDialogue:
    """Return the dialogue that regenerates a record; the new record has the form of the old one.

    In a conversation, only the assistant's answers are replaced, and a question at its end is
    answered. Turns with tool calls are kept,
    because later turns contain the results of the calls. A text keeps its beginning, and a record
    of token ids keeps the tokens before the first response.

    Args:
        prompt_tokens: largest number of tokens kept at the beginning of a text; at most half of the
            text is kept.
    """
    key = form_of(record)
    if key == "text":
        dialogue = _continue_text(record, tokenizer, prompt_tokens)
    elif key == "input_ids":
        dialogue = _continue_tokens(record)
    else:
        dialogue = _answer_turns(chat_of(record, key, may_ask=True), tokenizer)
    # Fields that have nothing to do with the answers, such as an id, are kept.
    others = {name: value for name, value in record.fields.items() if name not in _REPLACED}
    return others | (yield from dialogue)


def _answer_turns(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> RecordDialogue:
    new, turns = chat._replace(messages=[]), list(chat.messages)
    if turns[-1]["role"] == "user":
        turns.append({"role": "assistant"})
    answers = chat._replace(messages=turns).answers
    for index, turn in enumerate(turns):
        if index in answers and "tool_calls" not in turn:
            question = render_question(tokenizer, new)
            answer = yield tokenizer(question, add_special_tokens=False)["input_ids"]
            turn = {"role": "assistant", "content": _kept(answer.text, answer)} | _mark(answer)
        new.messages.append(turn)
    return {"messages": new.messages} | ({"tools": chat.tools} if chat.tools else {})


def _continue_text(
    record: Record, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> RecordDialogue:
    text = record.fields["text"]
    ids = tokenizer(text)["input_ids"] if isinstance(text, str) else []
    start = ids[: min(prompt_tokens, len(ids) // 2)]
    if not start:
        raise RecordError(f"{record.location} contains no text to be continued: {repr(text)[:80]}")
    answer = yield start
    whole = text_of_tokens(tokenizer, [*start, *answer.token_ids])
    return {"text": _kept(whole, answer)} | _mark(answer)


def _kept(text: str, answer: Answer) -> str:
    """Return a text that ends with the last whole character if the answer is cut off."""
    return text.rstrip(REPLACEMENT) if answer.is_cut else text


def _mark(answer: Answer) -> dict[str, bool]:
    """Return the key that marks a cut-off answer, so that training does not learn an end there.

    Records of token ids need no such key, because no end token is added to them in training.
    """
    return {CUT: True} if answer.is_cut else {}


def _continue_tokens(record: Record) -> RecordDialogue:
    document = read_tokens(record)
    begin = int(document.is_response.argmax()) if document.is_response.any() else 0
    if begin == 0:
        raise RecordError(f"{record.location} has no prompt before a response in its loss_mask")
    prompt = document.token_ids[:begin].tolist()
    new = (yield prompt).token_ids
    return {"input_ids": [*prompt, *new], "loss_mask": [0] * begin + [1] * len(new)}
