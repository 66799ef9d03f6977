"""A row of data whose answers are asked for one by one: each question holds the answers before."""

from collections.abc import Generator
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from training.data.chat import CUT, Chat, parse_chat
from training.data.documents import form_of, read_tokens
from training.data.rendering import render_question
from training.data.sources import Record, RowError


class Answer(NamedTuple):
    """What the target wrote, and whether the longest length cut it off before its end."""

    token_ids: list[int]
    text: str
    is_cut: bool


# Yields the token ids of each question, is sent the answer, and returns the new row.
Dialogue = Generator[list[int], Answer, dict[str, Any]]


def dialogue_over(
    record: Record, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> Dialogue:
    """Return the dialogue that makes a row anew, in the form that it has.

    A conversation keeps all turns but the assistant's; calls of tools stay, too, for their results
    follow. A text keeps its start, tokens what comes before their first response.

    Args:
        record: the row.
        tokenizer: the target's.
        prompt_tokens: start of a text, of which at most half is kept.

    Raises:
        RowError: the row cannot be used.
    """
    key = form_of(record)
    if key == "text":
        return _continue_text(record, tokenizer, prompt_tokens)
    if key == "input_ids":
        return _continue_tokens(record)
    chat = parse_chat(record.fields[key], record.fields.get("tools"), record.place)
    return _hold(chat, tokenizer)


def _hold(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> Dialogue:
    said = chat._replace(messages=[])
    for index, turn in enumerate(chat.messages):
        if index in chat.answers and "tool_calls" not in turn:
            question = render_question(tokenizer, said)
            answer = yield tokenizer(question, add_special_tokens=False)["input_ids"]
            turn = {"role": "assistant", "content": answer.text} | _mark(answer)
        said.messages.append(turn)
    return {"messages": said.messages} | ({"tools": chat.tools} if chat.tools else {})


def _continue_text(
    record: Record, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> Dialogue:
    text = record.fields["text"]
    ids = tokenizer(text)["input_ids"] if isinstance(text, str) else []
    start = ids[: min(prompt_tokens, len(ids) // 2)]
    if not start:
        raise RowError(
            f"{record.place} holds no text to be continued",
            expected="a string of two tokens at least",
            got=repr(text)[:80],
        )
    answer = yield start
    whole = tokenizer.decode([*start, *answer.token_ids], skip_special_tokens=True)
    return {"text": str(whole)} | _mark(answer)


def _mark(answer: Answer) -> dict[str, bool]:
    """Return what tells training that there is no end to be learnt; tokens need no such mark."""
    return {CUT: True} if answer.is_cut else {}


def _continue_tokens(record: Record) -> Dialogue:
    document = read_tokens(record)
    begin = int(document.is_response.argmax()) if document.is_response.any() else 0
    if begin == 0:
        raise RowError(
            f"{record.place} has no prompt before a response",
            expected="a loss_mask of 0 and then 1",
            got="no response" if not document.is_response.any() else "a response at once",
        )
    prompt = document.token_ids[:begin].tolist()
    new = (yield prompt).token_ids
    return {"input_ids": [*prompt, *new], "loss_mask": [0] * begin + [1] * len(new)}
