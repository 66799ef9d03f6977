"""The draft vocabulary: the most frequent tokens of the responses."""

from collections.abc import Iterable
from itertools import islice
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.errors import DataError
from training.data.token_store import TokenStore

_GROUP_SIZE = 1024  # number of documents whose tokens are counted at once


def choose_draft_ids(
    store: TokenStore, documents: Iterable[SupportsIndex], size: int, vocab_size: int
) -> Int[Tensor, " drafted"]:
    """Return the ids of the most frequent tokens of the responses, in ascending order.

    Of equally frequent tokens, those with smaller ids are selected, so that the result depends only
    on the data.

    Args:
        store: store of the documents.
        documents: indices of the training documents.
        size: number of ids to return.
        vocab_size: size of the target's vocabulary.

    Raises:
        DataError: the responses have fewer different tokens than `size`.
    """
    counts = np.zeros(vocab_size, np.int64)
    remaining = iter(documents)
    while group := list(islice(remaining, _GROUP_SIZE)):
        read = map(store.document, group)
        responses = [document.token_ids[document.is_response] for document in read]
        counts += np.bincount(np.concatenate(responses), minlength=vocab_size)
    if (known := int((counts > 0).sum())) < size:
        raise DataError(
            "drafter.draft_vocab_size is larger than the number of tokens used in the responses",
            expected=f"at most {known}, the number of different tokens in the responses",
            got=size,
            remedy="lower drafter.draft_vocab_size, or leave it out to draft from all tokens",
        )
    most_frequent = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(most_frequent))
