"""A look at documents as the drafter meets them: what it learns to guess stands out."""

from itertools import pairwise

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from training.data.token_store import TokenStore

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
