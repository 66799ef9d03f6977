"""What a row of data must have, and must not have, to be trained on."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.intake import RowError
from training.data.sources import Record

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
