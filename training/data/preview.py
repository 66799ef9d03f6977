"""Previews of documents, with the responses in color."""

from itertools import pairwise

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from training.data.token_store import TokenStore

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
