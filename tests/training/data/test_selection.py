"""Validation documents, prompts and the draft vocabulary, chosen from the documents."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jakiro.errors import DataError
from training.data.selection import automatic_size, choose_draft_ids, prompts_of, split_validation
from training.data.token_store import TokenStore

LENGTHS = (9, 30, 12, 50, 8, 21)


def store(order: list[int], first_response: int = 0) -> TokenStore:
    """Return documents in the given order; each is filled with its own number."""
    starts = np.cumsum([0, *(LENGTHS[number] for number in order)])
    token_ids = np.concatenate([np.full(LENGTHS[n], n, np.int32) for n in order])
    positions = np.concatenate([np.arange(LENGTHS[n]) for n in order])
    return TokenStore(token_ids, positions >= first_response, starts, "any")


def _answered(prompts: list[int], length: int) -> TokenStore:
    """Return records with prompts of one repeated token, each with an answer of its own."""
    tokens = [[prompt] * length + [100 + n] for n, prompt in enumerate(prompts)]
    is_response = np.tile([False] * length + [True], len(prompts))
    starts = np.arange(len(prompts) + 1) * (length + 1)
    return TokenStore(np.array(tokens, np.int32).ravel(), is_response, starts, "any")


def test_other_answers_to_a_held_out_prompt_are_not_trained_on() -> None:
    prompts = [0, 1, 2, 0, 1, 2]
    twice = _answered(prompts, 8)
    for count in (1, 2):
        training, validation = split_validation(twice, count)
        assert len(validation) == count
        held_out = {prompts[document] for document in validation}
        assert [prompts[document] for document in training] == [
            prompt for prompt in prompts if prompt not in held_out
        ]
    assert len(split_validation(twice, 5)[0]) == 1  # nothing else remains


@pytest.mark.parametrize(("length", "count"), [(1, 6), (8, 40)])
def test_a_beginning_of_one_token_or_of_very_many_records_is_no_prompt(
    length: int, count: int
) -> None:
    alike = _answered([0] * count, length)
    training, validation = split_validation(alike, 3)
    assert (len(training), len(validation)) == (count - 3, 3)


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_documents_of_one_conversation_are_held_out_together_or_not_at_all(
    count: int, fraction: float
) -> None:
    records = [1, 2, 2, 2, 4, 4]
    located = replace(
        store([0, 1, 2, 3, 4, 5]), records=np.array([(0, record) for record in records])
    )
    training, validation = (
        {records[document] for document in documents}
        for documents in split_validation(located, count, fraction)
    )
    assert len(validation) == count
    assert len(training) == max(1, round(fraction * (3 - count)))
    assert training.isdisjoint(validation)
    used = np.concatenate(split_validation(located, count, fraction))
    expected = [n for n, record in enumerate(records) if record in training | validation]
    assert sorted(used) == expected
    with pytest.raises(DataError, match="leaves nothing to train on"):
        split_validation(located, 3)


def test_the_order_of_the_data_does_not_matter() -> None:
    validation = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]):
        validation.append({order[index] for index in split_validation(store(order), 3)[1]})
    assert validation[0] == validation[1]


def test_prompts_are_beginnings_of_documents_that_fit_into_the_context() -> None:
    options = {"prompt_tokens": 10, "longest": 99, "count": 9}
    chats, texts = store([0, 1], first_response=5), store([0, 1, 2])
    assert prompts_of(chats, np.array([1, 0]), **options) == [[1] * 5, [0] * 5]
    assert prompts_of(texts, [0, 1], **options) == [[0] * 4, [1] * 10]  # at most half of a text
    assert prompts_of(texts, [1, 2, 0], **options | {"longest": 6, "count": 1}) == [[2] * 6]


def store_of(*documents: list[int], prompt: int = 0) -> TokenStore:
    """Return documents whose first `prompt` tokens are not part of a response."""
    starts = np.cumsum([0, *map(len, documents)])
    is_response = np.concatenate([np.arange(len(tokens)) >= prompt for tokens in documents])
    return TokenStore(np.concatenate(documents).astype(np.int32), is_response, starts, "any")


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.data())
def test_ties_go_to_smaller_ids_whatever_the_order(tokens: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(set(tokens))))
    by_count = sorted(set(tokens), key=lambda token: (-tokens.count(token), token))
    shuffled = data.draw(st.permutations(tokens))
    got = choose_draft_ids(store_of(list(shuffled)), [0], size, 21)
    assert got.tolist() == sorted(by_count[:size])
    assert got.dtype == torch.int64


@pytest.mark.parametrize(
    ("num_frequent", "num_others", "vocab_size", "expected"),
    [
        (8_192, 0, 50_000, 8_192),
        (8_193, 0, 50_000, 8_192),  # 8,192 of 8,193 equally frequent tokens: more than 97%
        (9_000, 0, 50_000, 16_384),
        (50_000, 0, 50_000, 32_768),  # no size covers 97%
        (30_000, 0, 32_768, None),
        (30_000, 0, 32_769, 32_768),
        (16_383, 0, 16_384, None),
    ],
)
def test_the_automatic_size_is_the_smallest_that_covers_97_percent(
    num_frequent: int, num_others: int, vocab_size: int, expected: int | None
) -> None:
    counts = np.zeros(vocab_size, np.int64)
    counts[:num_frequent] = 100
    counts[vocab_size - num_others :] = 1
    shuffled = np.random.default_rng(0).permutation(counts)
    assert automatic_size(shuffled) == expected
