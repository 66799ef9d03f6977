"""Which tokens a drafter with a vocabulary of its own drafts: the most frequent ones."""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.errors import DataError
from training.data.token_store import TokenStore


def choose_draft_ids(
    store: TokenStore, documents: Iterable[int], size: int, vocab_size: int
) -> Int[Tensor, " drafted"]:
    """Return the ids of the most frequent tokens of the responses, ascending.

    Of equally frequent ones the smaller ids are taken, so the choice depends on the data alone.

    Args:
        store: the tokens.
        documents: that are trained on.
        size: how many ids.
        vocab_size: of the target.

    Raises:
        DataError: there are fewer different tokens than that.
    """
    counts = np.zeros(vocab_size, np.int64)
    for index in documents:
        document = store.document(index)
        counts += np.bincount(document.token_ids[document.is_response], minlength=vocab_size)
    if (known := int((counts > 0).sum())) < size:
        raise DataError(
            "drafter.draft_vocab_size is larger than what the responses are written in",
            expected=f"at most {known}, the number of different tokens in them",
            got=size,
            remedy="lower it, or leave it out to draft all tokens",
        )
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))
