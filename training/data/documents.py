"""From a row of data to tokens, and which of them the drafter shall learn to guess."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from training.data.chat import CUT, parse_chat
from training.data.rendering import Rendered, encode_by_prefixes, gives_offsets, render_chat
from training.data.sources import Intake, Record, RowError

FORMS = ("text", "messages", "conversations", "input_ids")


def form_of(record: Record) -> str:
    """Return the key that says which form a row has.

    Raises:
        RowError: it has none of them, or nothing but null under it, or several, of which one would
            be taken silently; or half a character, which no tokenizer takes.
    """
    given = [key for key in FORMS if record.fields.get(key) is not None]
    if len(given) == 1:
        _check_text(record, given[0])
        return given[0]
    what = "has several forms at once" if given else "is neither a text nor a conversation"
    shown = (f"{key}: null" if value is None else key for key, value in record.fields.items())
    raise RowError(
        f"{record.place} {what}",
        expected=f"one of the keys {', '.join(FORMS)}, and not null",
        got=", ".join(given or shown) or "no keys",
        remedy="leave one of them" if given else None,
    )


def check_mask(is_response: npt.NDArray[np.bool_], place: str) -> None:
    """Refuse a row of which nothing is learnt, or in which nothing asks for what is.

    Args:
        is_response: of each token.
        place: of the row, for messages.

    Raises:
        RowError: the mask is the same everywhere.
    """
    num_inside = int(is_response.sum())
    if not 0 < num_inside < len(is_response):
        raise RowError(
            f"the response mask of {place} is the same everywhere",
            expected="a prompt and a response",
            got="no response" if num_inside == 0 else "nothing but response",
            remedy="check the row and the chat template; a text without prompts has the key text",
        )


def check_vocabulary(token_ids: npt.NDArray[np.int32], place: str, vocab_size: int | None) -> None:
    """Refuse a row with tokens that the target does not have.

    Args:
        token_ids: of the row.
        place: of the row, for messages.
        vocab_size: of the target, if it is known.

    Raises:
        RowError: an id is too large.
    """
    highest = int(token_ids.max(initial=0))
    if vocab_size is not None and highest >= vocab_size:
        raise RowError(
            f"{place} has a token that the target does not have",
            expected=f"ids from 0 to {vocab_size - 1}",
            got=highest,
            remedy="use the target's own tokenizer",
        )


def _check_text(record: Record, key: str) -> None:
    for value in () if key == "input_ids" else (record.fields[key], record.fields.get("tools")):
        for text in _strings_in(value):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RowError(
                    f"{record.place} holds half a character",
                    expected="text that can be written as UTF-8",
                    got=f"a lone surrogate in {text[max(0, error.start - 20) : error.end]!r}",
                ) from error


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_strings_in, (*value, *value.values())))
    elif isinstance(value, list | tuple | np.ndarray):
        yield from chain.from_iterable(map(_strings_in, value))


BATCH = 256  # rows that the tokenizer reads at once, on several threads


class Document(NamedTuple):
    """Tokens of one row of data; `is_response` marks those that the drafter learns to guess."""

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]


class _Text(NamedTuple):
    """A text that is all response, perhaps without its end."""

    text: str
    is_cut: bool


_Part = _Text | Rendered | Document  # a text, a text with its responses, or tokens
_Parts = tuple[Record, list[_Part]]  # with their row


def encode_documents(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[Record],
    intake: Intake | None = None,
    vocab_size: int | None = None,
    any_mask: bool = False,
) -> Iterator[Document]:
    """Yield the tokens of all rows, one document after another; see `encode_rows`."""
    for _, documents in encode_rows(tokenizer, records, intake, vocab_size, any_mask):
        yield from documents


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[Record],
    intake: Intake | None = None,
    vocab_size: int | None = None,
    any_mask: bool = False,
) -> Iterator[tuple[Record, list[Document]]]:
    """Yield the tokens of each row; of a conversation there may be several documents.

    Rows are `{"text"}`, `{"messages": [{"role", "content"}]}`, `{"conversations": [{"from",
    "value"}]}` or `{"input_ids", "loss_mask"}`. A text counts as response from beginning to end and
    is closed by the end-of-sequence token; of a conversation the assistant's turns count, of tokens
    those whose mask is 1. A text or turn with `"is_cut": true` has no end that is to be learnt.

    Args:
        tokenizer: the target's.
        records: the rows.
        intake: counts rows, and may pass over unusable ones.
        vocab_size: of the target, if it is known.
        any_mask: whether a row may be without a response, or nothing but response: for those who
            look at tokens only.

    Raises:
        DataError: a row has none of these forms or several, no response or nothing but response, or
            tokens that the target does not have; or conversations meet no template, or a tokenizer
            that does not tell where their responses are.
    """
    intake, remaining = intake or Intake(), iter(records)
    while group := list(islice(remaining, BATCH)):
        rows = [row for record in group for row in _read(tokenizer, record, intake)]
        documents = _encode(tokenizer, [part for _, parts in rows for part in parts])
        for record, parts in rows:
            own = list(islice(documents, len(parts)))
            with intake.guard():
                for part, document in zip(parts, own, strict=True):
                    if not (any_mask or isinstance(part, _Text)):
                        check_mask(document.is_response, record.place)
                    check_vocabulary(document.token_ids, record.place, vocab_size)
                yield record, own


def read_tokens(record: Record) -> Document:
    """Return the tokens of a row that is tokenised already.

    Raises:
        RowError: `input_ids` and `loss_mask` are no numbers, or do not fit together.
    """
    ids, mask = (_numbers(record, key) for key in ("input_ids", "loss_mask"))
    if len(ids) != len(mask) or not np.isin(mask, (0, 1)).all():
        raise RowError(
            f"{record.place} has a mask that does not fit its tokens",
            expected=f"a loss_mask of {len(ids)} numbers, each 0 or 1",
            got=f"{len(mask)} from {mask.min(initial=0)} to {mask.max(initial=0)}",
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise RowError(
            f"{record.place} has impossible token ids",
            expected="ids of the target's vocabulary",
            got=f"ids from {ids.min()} to {ids.max()}",
        )
    return Document(ids.astype(np.int32), mask.astype(np.bool_))


def _numbers(record: Record, key: str) -> npt.NDArray[np.int64]:
    value = record.fields.get(key)
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        numbers = np.empty((0, 0))
    is_empty = isinstance(value, list) and not value
    if not is_empty and (numbers.ndim != 1 or numbers.dtype.kind not in "bi"):
        raise RowError(
            f"{record.place} has unusable {key}",
            expected="a list of integers under input_ids, and one of 0 and 1 under loss_mask",
            got=repr(value)[:80],
        )
    return numbers.astype(np.int64)


def _read(tokenizer: PreTrainedTokenizerBase, record: Record, intake: Intake) -> Iterator[_Parts]:
    with intake.guard():
        key = form_of(record)
        if key == "input_ids":
            parts: list[_Part] = [read_tokens(record)]
        elif key == "text":
            parts = [_text(record)]
        else:
            chat = parse_chat(record.fields[key], record.fields.get("tools"), record.place)
            rendered = render_chat(tokenizer, chat)
            parts = [*rendered]
            if not gives_offsets(tokenizer):
                encoded = (encode_by_prefixes(tokenizer, one, record.place) for one in rendered)
                parts = [Document(*one) for one in encoded]
        yield record, parts


def _text(record: Record) -> _Text:
    text = record.fields["text"]
    if not isinstance(text, str):
        raise RowError(
            f"{record.place} holds no text", expected="a string", got=type(text).__name__
        )
    return _Text(text, is_cut=record.fields.get(CUT) is True)


def _encode(tokenizer: PreTrainedTokenizerBase, parts: Sequence[_Part]) -> Iterator[Document]:
    for kind, same in groupby(parts, key=type):
        yield from _ENCODERS[kind](tokenizer, list(same))


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[_Text]) -> Iterator[Document]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer([one.text for one in texts], verbose=False)["input_ids"]
    for ids, (_, is_cut) in zip(encoded, texts, strict=True):
        closed = ids if is_cut or ids[-1:] == end else ids + end
        yield Document(np.array(closed, np.int32), np.ones(len(closed), np.bool_))


def _encode_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Rendered]
) -> Iterator[Document]:
    encoded = tokenizer(
        [chat.text for chat in chats],
        add_special_tokens=False,  # the template has written them
        return_offsets_mapping=True,
        verbose=False,
    )
    for chat, ids, offsets in zip(
        chats, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        starts = np.array([begin for begin, _ in offsets])
        inside = [(starts >= begin) & (starts < end) for begin, end in chat.responses]
        yield Document(np.array(ids, np.int32), np.any(inside, axis=0))


def _keep(_: PreTrainedTokenizerBase, documents: Sequence[Document]) -> Iterator[Document]:
    yield from documents


_ENCODERS: dict[type, Any] = {_Text: _encode_texts, Rendered: _encode_chats, Document: _keep}
