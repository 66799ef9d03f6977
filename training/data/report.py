"""Previews of documents, and log messages about the data that several runs log only once."""

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
_logged: ContextVar[set[str] | None] = ContextVar("logged lines about the data", default=None)


@contextmanager
def report_once() -> Iterator[None]:
    """Log each line about the data only once in this context, even if several runs report it."""
    token = _logged.set(set())
    try:
        yield
    finally:
        _logged.reset(token)


def report(counts: DataCounts) -> None:
    """Log the counts of the data, and a warning with advice if there is much padding."""
    text = advice(counts.packed)
    if text is not None and _is_new(text):
        _logger.warning(text)
    for line in filter(_is_new, counts.lines()):
        _logger.info(line)


def advice(
    packed: PackCounts, split: str = "data.split", sequence_length: str = "data.sequence_length"
) -> str | None:
    """Return advice on how to reduce padding; None if there is little, or a single sequence."""
    if packed.padding <= TOLERATED_PADDING or packed.sequences < 2:
        return None
    wider = "" if packed.wider_split is None else f"{split}={packed.wider_split} or "
    return (
        f"{packed.padding:.0%} of all packed tokens are padding: try {wider}a different "
        f"{sequence_length}, such as twice the current value"
    )


def _is_new(line: str) -> bool:
    logged = _logged.get()
    if logged is None:
        return True
    is_new = line not in logged
    logged.add(line)
    return is_new


SHOWN = 600  # largest number of tokens of a document that are shown

_RESPONSE = "bold green"
_PROMPT = "dim"


def preview(store: TokenStore, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Text]:
    """Return colored previews of documents that are spread evenly over the data.

    For terminals without colors, responses are also enclosed in ⟦ and ⟧.
    """
    indices = np.linspace(0, store.num_documents - 1, min(count, store.num_documents))
    return [_show(store, tokenizer, int(index)) for index in indices]


def _show(store: TokenStore, tokenizer: PreTrainedTokenizerBase, index: int) -> Text:
    ids, mask = store.document(index)
    title = f"document {index + 1:,} of {store.num_documents:,}, {store.describe([index])}: "
    counts = f"{len(ids):,} tokens, {int(mask.sum()):,} in responses, marked with ⟦ and ⟧\n"
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
