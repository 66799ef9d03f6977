"""Which tokens a drafter with a vocabulary of its own drafts: the most frequent ones."""

from collections.abc import Iterable
from itertools import islice
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.errors import DataError
from training.data.token_store import TokenStore

_TOGETHER = 1024  # documents; each count passes over the whole vocabulary


def choose_draft_ids(
    store: TokenStore, documents: Iterable[SupportsIndex], size: int, vocab_size: int
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
    remaining = iter(documents)
    while several := list(islice(remaining, _TOGETHER)):
        responses = [one.token_ids[one.is_response] for one in map(store.document, several)]
        counts += np.bincount(np.concatenate(responses), minlength=vocab_size)
    if (known := int((counts > 0).sum())) < size:
        raise DataError(
            "drafter.draft_vocab_size is larger than what the responses are written in",
            expected=f"at most {known}, the number of different tokens in them",
            got=size,
            remedy="lower it, or leave it out to draft all tokens",
        )
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))
