"""From a row of data to tokens, and which of them the drafter shall learn to guess."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from training.data.chat import Span, parse_messages, render_chat
from training.data.sources import Record

BATCH = 256  # rows that the tokenizer reads at once, on several threads


class Document(NamedTuple):
    """Tokens of one row of data; `is_response` marks those that the drafter learns to guess."""

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]


class _Rendered(NamedTuple):
    text: str
    responses: tuple[Span, ...] | None  # None: all of it


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, records: Iterable[Record]
) -> Iterator[Document]:
    """Yield the tokens of each row.

    Rows are `{"text"}`, `{"messages": [{"role", "content"}]}` or
    `{"conversations": [{"from", "value"}]}`. A text counts as response from beginning to end and
    is closed by the end-of-sequence token; of a conversation the assistant's turns count.

    Raises:
        DataError: a row has none of these forms, or no assistant turn.
    """
    remaining = iter(records)
    while group := list(islice(remaining, BATCH)):
        rendered = [_render(tokenizer, record) for record in group]
        for is_chat, rows in groupby(rendered, key=lambda row: row.responses is not None):
            yield from (_encode_chats if is_chat else _encode_texts)(tokenizer, list(rows))


def _render(tokenizer: PreTrainedTokenizerBase, record: Record) -> _Rendered:
    text = record.fields.get("text")
    if isinstance(text, str):
        return _Rendered(text, None)
    turns = record.fields.get("messages", record.fields.get("conversations"))
    if turns is None:
        raise DataError(
            f"{record.place} is neither a text nor a conversation",
            expected="one of the keys text, messages, conversations",
            got=", ".join(record.fields) or "no keys",
        )
    return _Rendered(*render_chat(tokenizer, parse_messages(turns, record.place), record.place))


def _encode_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Rendered]
) -> Iterator[Document]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for ids in tokenizer([row.text for row in rows], verbose=False)["input_ids"]:
        closed = ids if ids[-1:] == end else ids + end
        yield Document(np.array(closed, np.int32), np.ones(len(closed), np.bool_))


def _encode_chats(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Rendered]
) -> Iterator[Document]:
    encoded = tokenizer(
        [row.text for row in rows],
        add_special_tokens=False,  # the template has written them
        return_offsets_mapping=True,
        verbose=False,
    )
    for row, ids, offsets in zip(
        rows, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        starts = np.array([begin for begin, _ in offsets])
        inside = [(starts >= begin) & (starts < end) for begin, end in row.responses or ()]
        yield Document(np.array(ids, np.int32), np.any(inside, axis=0))
