"""Telling what became of the data; a study of many runs on the same data hears it once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from jakiro.utils.logs import get_logger
from training.data.counts import DataCounts, PackCounts
from training.data.row_layout import TOLERATED_PADDING
from training.data.token_store import TokenStore

_logger = get_logger(__name__)
_said: ContextVar[set[str] | None] = ContextVar("what was said of the data", default=None)


@contextmanager
def said_once() -> Iterator[None]:
    """Inside, nothing is said of the data that was said inside before, whichever run says it."""
    token = _said.set(set())
    try:
        yield
    finally:
        _said.reset(token)


def report(counts: DataCounts) -> None:
    """Log what became of the data, and advice if there is any."""
    said = advice(counts.packed)
    if said is not None and _is_new(said):
        _logger.warning(said)
    for line in filter(_is_new, counts.lines()):
        _logger.info(line)


def advice(
    packed: PackCounts, split: str = "data.split", sequence_length: str = "data.sequence_length"
) -> str | None:
    """Return what to do about padding, if it is a waste.

    Args:
        packed: what was packed.
        split: name of the setting that splits documents, where the user is.
        sequence_length: name of that of a row's length.
    """
    if packed.padding <= TOLERATED_PADDING:
        return None
    wider = "" if packed.wider_split is None else f"{split} {packed.wider_split}, or "
    return (
        f"{packed.padding:.0%} of what is read is padding: {wider}another {sequence_length}, such as "
        "twice this one, may waste less"
    )


def _is_new(line: str) -> bool:
    said = _said.get()
    if said is None:
        return True
    is_new = line not in said
    said.add(line)
    return is_new


SHOWN = 600  # tokens of a document; a longer one is cut

_RESPONSE = "bold green"
_PROMPT = "dim"


def preview(store: TokenStore, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Text]:
    """Return documents, evenly spread over the data, in colours.

    Responses also stand between ⟦ and ⟧, for terminals without colours.

    Args:
        store: the documents.
        tokenizer: decodes them, special tokens included.
        count: how many at most.
    """
    places = np.linspace(0, store.num_documents - 1, min(count, store.num_documents))
    return [_show(store, tokenizer, int(place)) for place in places]


def _show(store: TokenStore, tokenizer: PreTrainedTokenizerBase, place: int) -> Text:
    ids, mask = store.document(place)
    title = f"document {place + 1:,} of {store.num_documents:,}, {store.describe([place])}: "
    counts = f"{len(ids):,} tokens, {int(mask.sum()):,} of responses\n"
    text = Text.assemble((title + counts, "bold"))
    shown, mask = ids[:SHOWN], mask[:SHOWN]
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(shown)]
    for begin, end in pairwise(borders):
        part = str(tokenizer.decode(shown[begin:end].tolist()))
        if mask[begin]:
            text.append(f"⟦{part}⟧", style=_RESPONSE)
        else:
            text.append(part, style=_PROMPT)
    if len(ids) > SHOWN:
        text.append(f" ... {len(ids) - SHOWN:,} more tokens", style="italic")
    return text
