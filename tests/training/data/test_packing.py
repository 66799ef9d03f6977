"""Packing keeps every token, isolates documents, and leaves little padding."""

import numpy as np
import pytest
from helpers.training import store_of
from hypothesis import given
from hypothesis import strategies as st

from training.data.counts import PackCounts
from training.data.packing import PackedRows
from training.data.report import advice


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30),
    sequence_length=st.integers(2, 20),
)
def test_every_token_that_follows_or_is_followed_appears_once_and_documents_stay_whole(
    lengths: list[int], sequence_length: int
) -> None:
    store = store_of(lengths)
    rows = PackedRows(store, range(len(lengths)), sequence_length)
    seen = []
    for index in range(len(rows)):
        row = rows.row(index)
        for number in range(row.documents.max() + 1):
            inside = row.documents == number
            tokens = row.token_ids[inside]
            assert (np.diff(tokens) == 1).all()  # consecutive tokens of one document
            assert (row.positions[inside] == np.arange(inside.sum())).all()
            assert (row.document_starts[inside] == np.flatnonzero(inside)[0]).all()
            seen += tokens.tolist()
        assert (row.is_response == (row.documents >= 0)).all()
    # Only a document longer than a row is split; nothing follows a last piece of one token.
    ends = np.cumsum(lengths)
    alone = [
        int(end) - 1
        for end, length in zip(ends, lengths, strict=True)
        if length % sequence_length == 1
    ]
    assert sorted([*seen, *alone]) == list(range(sum(lengths)))
    assert rows.counts.left_out == rows.counts.left_out_tokens == len(alone)
    pieces = sum(-(-length // sequence_length) for length in lengths) - len(alone)
    numbers = [rows.row(index).documents.max() + 1 for index in range(len(rows))]
    assert sum(numbers) == pieces
    assert rows.counts.split == sum(length > sequence_length for length in lengths)
    assert rows.counts.padding == pytest.approx(1 - len(seen) / (len(rows) * sequence_length))


def test_padding_stays_under_five_percent_on_conversations_of_many_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 3000).astype(int).clip(8)
    rows = PackedRows(store_of(lengths.tolist()), range(len(lengths)), 2048)
    assert 1 - lengths.sum() / (len(rows) * 2048) < 0.05


def test_a_piece_without_responses_is_not_packed() -> None:
    store = store_of([10, 10])
    store.is_response[:10] = False
    store.is_response[3] = True
    rows = PackedRows(store, range(2), 5)
    tokens = np.concatenate([rows.row(index).token_ids for index in range(len(rows))])
    assert sorted(tokens.tolist()) == [*range(5), *range(10, 20)]
    assert (rows.counts.left_out, rows.counts.left_out_tokens) == (1, 5)
    assert (rows.counts.split, rows.counts.documents, rows.counts.rows) == (2, 2, 3)


@pytest.mark.parametrize("documents", [[0], [1], []])
def test_only_the_chosen_documents_are_packed(documents: list[int]) -> None:
    rows = PackedRows(store_of([4, 4]), documents, 8)
    tokens = [t for i in range(len(rows)) for t in rows.row(i).token_ids[rows.row(i).is_response]]
    assert tokens == [token for index in documents for token in range(4 * index, 4 * index + 4)]


@pytest.mark.parametrize(("padding", "advises"), [(0.04, False), (0.06, True)])
def test_much_padding_comes_with_advice(padding: float, advises: bool) -> None:
    packed = PackCounts(
        rows=1, documents=1, padding=padding, split=0, left_out=0, left_out_tokens=0
    )
    said = advice(packed)
    assert (said is not None and "data.sequence_length" in said) is advises
