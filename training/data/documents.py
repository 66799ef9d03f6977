"""Encoding of data records as documents: tokens, with a mask of the tokens to be predicted."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from training.data.rendering import CUT, SYSTEM, Rendered, chat_of, render_chat
from training.data.sources import Intake, Record, RecordError

FORMS = ("text", "messages", "conversations", "input_ids")
BATCH_SIZE = 256  # number of records that the tokenizer encodes at once, on several threads


class Document(NamedTuple):
    """The tokens of a document; `is_response` marks those that the drafter learns to predict."""

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]


class _Text(NamedTuple):
    """A text that is treated as a response; `is_cut` is true if its end is missing."""

    text: str
    is_cut: bool


_Part = _Text | Rendered | Document  # a text, a rendered conversation, or tokens


def form_of(record: Record) -> str:
    """Return the key, one of `FORMS`, that determines the form of a record."""
    given = [key for key in FORMS if record.fields.get(key) is not None]
    if len(given) != 1:
        what = "has several forms at once" if given else "is neither a text nor a conversation"
        raise RecordError(
            f"{record.location} {what}",
            expected=f"one of the keys {', '.join(FORMS)}",
            got=", ".join(given or record.fields) or "no keys",
        )
    if given[0] != "input_ids":
        texts = [record.fields.get(name) for name in (given[0], "tools", SYSTEM)]
        try:
            json.dumps(texts, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:  # half of a UTF-16 pair, which no tokenizer accepts
            raise RecordError(f"{record.location} contains an invalid character") from error
    return given[0]


def check_mask(is_response: npt.NDArray[np.bool_], location: str) -> None:
    """Raise an error if a record contains only a prompt or only a response."""
    num_inside = int(is_response.sum())
    if not 0 < num_inside < len(is_response):
        raise RecordError(
            f"{location} has {'no response' if num_inside == 0 else 'no prompt'}",
            remedy="check the record and the chat template; a text without a prompt belongs under "
            'the key "text"',
        )


def check_vocabulary(highest: int, location: str, vocab_size: int | None) -> None:
    if vocab_size is not None and highest >= vocab_size:
        raise RecordError(
            f"{location} has a token that the target does not have",
            expected=f"ids from 0 to {vocab_size - 1}",
            got=highest,
            remedy="use the target's tokenizer",
        )


def encode_documents(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[Record],
    intake: Intake | None = None,
    vocab_size: int | None = None,
    any_mask: bool = False,
) -> Iterator[Document]:
    for _, documents in encode_records(tokenizer, records, intake, vocab_size, any_mask):
        yield from documents


def encode_records(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[Record],
    intake: Intake | None = None,
    vocab_size: int | None = None,
    any_mask: bool = False,
) -> Iterator[tuple[Record, list[Document]]]:
    """Yield each record with its documents.

    A conversation has a single document, unless the chat template changes earlier turns when later
    turns follow. In that case, it has one document for each answer.

    Records have the form `{"text"}`, `{"messages": [{"role", "content"}]}`, `{"conversations":
    [{"from", "value"}]}` or `{"input_ids", "loss_mask"}`. A text is treated as a single response,
    and the end-of-sequence token is appended. In a conversation, the responses are the answers of
    the assistant. In a record of token ids, the responses are the tokens with mask 1. A text or
    turn with `"is_cut": true` lacks its end, so the drafter does not learn to predict an end token
    there.

    Args:
        any_mask: whether a record may consist of a prompt only, or of a response only.
    """
    intake, remaining = intake or Intake(), iter(records)
    while group := list(islice(remaining, BATCH_SIZE)):
        usable = [pair for record in group for pair in _read(tokenizer, record, intake)]
        documents = _encode(tokenizer, [*chain.from_iterable(parts for _, parts in usable)])
        for record, parts in usable:
            of_record = list(islice(documents, len(parts)))
            with intake.guard():
                for part, document in zip(parts, of_record, strict=True):
                    if not (any_mask or isinstance(part, _Text)):
                        check_mask(document.is_response, record.location)
                    highest = int(document.token_ids.max(initial=0))
                    check_vocabulary(highest, record.location, vocab_size)
                yield record, of_record


def read_tokens(record: Record) -> Document:
    ids, mask = (_numbers(record, key) for key in ("input_ids", "loss_mask"))
    if len(ids) != len(mask) or not np.isin(mask, (0, 1)).all():
        raise RecordError(
            f"{record.location} has a loss_mask that does not match its input_ids",
            expected=f"a loss_mask of {len(ids)} numbers, each 0 or 1",
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise RecordError(f"{record.location} has token ids from {ids.min()} to {ids.max()}")
    return Document(ids.astype(np.int32), mask.astype(np.bool_))


def _numbers(record: Record, key: str) -> npt.NDArray[np.int64]:
    try:
        numbers = np.asarray(record.fields.get(key))
    except ValueError:  # lists of unequal lengths
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "bi"):
        raise RecordError(f"{record.location} has no list of integers under {key}")
    return numbers.astype(np.int64)


def _read(
    tokenizer: PreTrainedTokenizerBase, record: Record, intake: Intake
) -> Iterator[tuple[Record, list[_Part]]]:
    """Yield a record with its parts, unless it is skipped."""
    with intake.guard():
        key = form_of(record)
        if key == "input_ids":
            parts: list[_Part] = [read_tokens(record)]
        elif key == "text":
            text = record.fields["text"]
            if not isinstance(text, str):
                raise RecordError(f'{record.location} has no text under the key "text"')
            parts = [_Text(text, is_cut=record.fields.get(CUT) is True)]
        else:
            chat = chat_of(record, key)
            intake.num_unlearned += len(chat.turns) - len(chat.answers)
            if not tokenizer.is_fast:
                raise DataError(
                    "conversations need a fast tokenizer, which tells where its tokens begin",
                    remedy="add the target's tokenizer.json, or provide input_ids with loss_mask",
                )
            parts = [*render_chat(tokenizer, chat)] if chat.answers else []
        yield record, parts


def _encode(tokenizer: PreTrainedTokenizerBase, parts: Sequence[_Part]) -> Iterator[Document]:
    """Yield the documents of parts; the parts of each kind are encoded together."""
    texts = [part for part in parts if isinstance(part, _Text)]
    chats = [part for part in parts if isinstance(part, Rendered)]
    of_texts, of_chats = _encode_texts(tokenizer, texts), _encode_chats(tokenizer, chats)
    for part in parts:
        if isinstance(part, Document):
            yield part
        else:
            yield next(of_texts if isinstance(part, _Text) else of_chats)


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[_Text]) -> Iterator[Document]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer([text.text for text in texts], verbose=False)["input_ids"]
    for ids, (_, is_cut) in zip(encoded, texts, strict=True):
        closed = ids if is_cut or ids[-1:] == end else ids + end
        yield Document(np.array(closed, np.int32), np.ones(len(closed), np.bool_))


def _encode_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Rendered]
) -> Iterator[Document]:
    encoded = tokenizer(
        [chat.text for chat in chats],
        add_special_tokens=False,  # the template has already added them
        return_offsets_mapping=True,
        verbose=False,
    )
    for chat, ids, offsets in zip(
        chats, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        starts = np.array([begin for begin, _ in offsets])
        inside = [(starts >= begin) & (starts < end) for begin, end in chat.responses]
        yield Document(np.array(ids, np.int32), np.any(inside, axis=0))
