"""What is chosen from the documents: validation documents, prompts, and the draft vocabulary."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Literal, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from inference.generation.prompts import Prompt
from jakiro.drafter_settings import AUTO_DRAFT_VOCAB_SIZES
from jakiro.errors import DataError
from jakiro.utils.logs import get_logger
from jakiro.utils.wording import counted
from training.data.documents import Document
from training.data.token_store import TokenStore

_logger = get_logger(__name__)

_SHORTEST_PROMPT = 8  # number of tokens; a shorter beginning, such as a single token, is no prompt
_MOST_ANSWERS = 16  # largest number of answers to one prompt

Documents = npt.NDArray[np.int64]

COVERAGE = 0.97  # share of the response tokens that an automatic size is meant to cover
_FEW = 8  # a vocabulary is suspiciously small if it has less than this share of its tokens

Counts = npt.NDArray[np.int64]


def split_validation(
    store: TokenStore, count: int, fraction: float = 1.0
) -> tuple[Documents, Documents]:
    """Return the indices of the training documents and of the validation documents.

    Records are selected by a hash of their first document, so the selection does not depend on the
    order of the data. The documents of one record, such as those for the answers of a conversation,
    stay together. Other answers to the prompt of a held-out record are left out of the training
    documents, unless the prompt has fewer than 8 tokens or more than 16 answers, or nothing else
    remains.
    """
    firsts = store.first_documents
    if count >= len(firsts):
        raise DataError(
            "data.validation_size leaves nothing to train on",
            expected=f"fewer than all {len(firsts)} records",
            got=count,
            remedy="lower data.validation_size, or add data",
        )
    if count == 0 and fraction == 1:
        return np.arange(store.num_documents), np.arange(0)
    hashes = np.array([store.hash_of(document) for document in firsts], np.uint64)
    by_hash = np.argsort(hashes, kind="stable")
    held_out, others = by_hash[:count], by_hash[count:]
    if count:
        others = others[_have_other_prompts(store, by_hash, count)]
    chosen = others[: max(1, round(fraction * len(others)))]
    return np.sort(_documents_of(store, chosen)), _documents_of(store, held_out)


def _have_other_prompts(
    store: TokenStore, records: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.bool_]:
    """Return which records do not answer a held-out prompt; if every record does, return all.

    The first `count` records are held out, and the others are looked at.
    """
    firsts = store.first_documents
    prompts = [_hash_of_prompt(store.document(firsts[record])) for record in records]
    answers = Counter(prompts)
    # What very many records begin with is no question, but an instruction to the assistant.
    held_out = {prompt for prompt in prompts[:count] if answers[prompt] <= _MOST_ANSWERS}
    have = np.array([prompt not in held_out for prompt in prompts[count:]], np.bool_)
    if have.all():
        return have
    if not have.any():
        _logger.warning("all records answer the prompts of those that are held out")
        return ~have
    _logger.info("%d records answer held-out prompts and are not trained on", (~have).sum())
    return have


def _hash_of_prompt(document: Document) -> bytes:
    """Return a hash of the tokens before the first response; of the whole text if they are few."""
    length = int(np.argmax(document.is_response))
    if length < _SHORTEST_PROMPT:
        length = len(document.token_ids)
    return hashlib.sha256(document.token_ids[:length].tobytes()).digest()


def _documents_of(store: TokenStore, records: npt.NDArray[np.int64]) -> Documents:
    borders = np.append(store.first_documents, store.num_documents)
    documents = [np.arange(borders[record], borders[record + 1]) for record in records]
    return np.concatenate([np.arange(0), *documents])


def prompts_of(
    store: TokenStore,
    documents: Iterable[SupportsIndex],
    *,
    prompt_tokens: int,
    longest: int,
    count: int,
) -> list[Prompt]:
    """Return prompts made from the beginnings of documents."""
    prompts = (_prompt_in(store.document(index), prompt_tokens) for index in documents)
    return list(islice((prompt for prompt in prompts if 0 < len(prompt) <= longest), count))


def _prompt_in(document: Document, prompt_tokens: int) -> list[int]:
    first_response = int(np.argmax(document.is_response))
    length = first_response or min(prompt_tokens, len(document.token_ids) // 2)
    return document.token_ids[:length].tolist()


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
