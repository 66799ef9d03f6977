"""The draft vocabulary: the most frequent tokens of the responses."""

from collections.abc import Iterable
from typing import Literal, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.drafter_settings import AUTO_DRAFT_VOCAB_SIZES
from jakiro.utils.logs import get_logger
from jakiro.utils.wording import counted
from training.data.token_store import TokenStore

COVERAGE = 0.97  # share of the response tokens that an automatic size is meant to cover
_FEW = 8  # a vocabulary is suspiciously small if it has less than this share of its tokens

_logger = get_logger(__name__)

Counts = npt.NDArray[np.int64]


def choose_draft_ids(
    store: TokenStore,
    documents: Iterable[SupportsIndex],
    size: int | Literal["auto"] | None,
    vocab_size: int,
) -> Int[Tensor, " drafted"] | None:
    """Return the ids of the most frequent tokens of the responses, in ascending order.

    Of equally frequent tokens, those with smaller ids are selected, so that the result depends only
    on the data. Tokens that the responses do not contain are never selected: if there are fewer
    different tokens than wanted, the result is shorter. The number of selected tokens and their
    share of the response tokens are logged.

    Returns:
        The ids; None if all tokens may be drafted.
    """
    if size is None or (size == "auto" and vocab_size <= AUTO_DRAFT_VOCAB_SIZES[0]):
        return None
    counts = count_responses(store, documents, vocab_size)
    wanted = automatic_size(counts) if size == "auto" else size
    if wanted is None:
        return None
    num_known = int((counts > 0).sum())
    most_frequent = np.argsort(-counts, kind="stable")[: min(wanted, num_known)]
    _logger.info(
        f"draft vocabulary{' (auto)' if size == 'auto' else ''}: {len(most_frequent):,} tokens, "
        f"which cover {counts[most_frequent].sum() / counts.sum():.1%} of the response tokens"
    )
    if num_known < wanted // _FEW:
        _logger.warning(
            f"the responses have only {counted(num_known, 'different token')}, and the drafter can "
            "draft no others; use more data, or draft_vocab_size=null"
        )
    return torch.from_numpy(np.sort(most_frequent))


def count_responses(
    store: TokenStore, documents: Iterable[SupportsIndex], vocab_size: int
) -> Counts:
    """Return the number of times that each token of the vocabulary occurs in the responses."""
    counts = np.zeros(vocab_size, np.int64)
    for document in map(store.document, documents):
        ids, occurrences = np.unique(document.token_ids[document.is_response], return_counts=True)
        counts[ids] += occurrences
    return counts


def automatic_size(counts: Counts) -> int | None:
    """Return the smallest size of `AUTO_DRAFT_VOCAB_SIZES` that covers enough response tokens.

    A size covers enough if this number of the most frequent tokens accounts for at least 97% of all
    occurrences. If no size covers enough, the largest one is returned, because every additional
    token makes each pass of the drafter slower. The result is None (no restriction) if the size
    would not be smaller than the vocabulary.
    """
    covered = np.cumsum(np.sort(counts)[::-1])
    for size in AUTO_DRAFT_VOCAB_SIZES:
        if size >= len(counts):
            return None
        if covered[size - 1] >= COVERAGE * covered[-1]:
            return size
    return AUTO_DRAFT_VOCAB_SIZES[-1]
