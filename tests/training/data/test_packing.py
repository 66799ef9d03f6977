"""Packing keeps every token, separates documents, and leaves little padding."""

import numpy as np
import pytest
from helpers.training import store_of
from hypothesis import given
from hypothesis import strategies as st

from training.data.counts import DataCounts, PackCounts, ReadCounts
from training.data.packing import PackedSequences


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30),
    sequence_length=st.integers(2, 20),
)
def test_every_token_with_a_neighbor_appears_once_and_documents_stay_whole(
    lengths: list[int], sequence_length: int
) -> None:
    store = store_of(lengths)
    sequences = PackedSequences(store, range(len(lengths)), sequence_length)
    seen = []
    for index in range(len(sequences)):
        sequence = sequences.sequence(index)
        for number in range(sequence.documents.max() + 1):
            inside = sequence.documents == number
            tokens = sequence.token_ids[inside]
            assert (np.diff(tokens) == 1).all()  # consecutive tokens of one document
            assert (sequence.positions[inside] == np.arange(inside.sum())).all()
            assert (sequence.document_starts[inside] == np.flatnonzero(inside)[0]).all()
            seen += tokens.tolist()
        assert (sequence.is_response == (sequence.documents >= 0)).all()
    # Only documents longer than a sequence are split. A last piece of one token is dropped.
    ends = np.cumsum(lengths)
    alone = [
        int(end) - 1
        for end, length in zip(ends, lengths, strict=True)
        if length % sequence_length == 1
    ]
    assert sorted([*seen, *alone]) == list(range(sum(lengths)))
    assert sequences.counts.left_out == sequences.counts.left_out_tokens == len(alone)
    pieces = sum(-(-length // sequence_length) for length in lengths) - len(alone)
    numbers = [sequences.sequence(index).documents.max() + 1 for index in range(len(sequences))]
    assert sum(numbers) == pieces
    assert sequences.counts.split == sum(length > sequence_length for length in lengths)
    assert sequences.counts.padding == pytest.approx(
        1 - len(seen) / (len(sequences) * sequence_length)
    )


def test_padding_stays_under_five_percent_on_conversations_of_many_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 3000).astype(int).clip(8)
    sequences = PackedSequences(store_of(lengths.tolist()), range(len(lengths)), 2048)
    assert 1 - lengths.sum() / (len(sequences) * 2048) < 0.05


def test_a_piece_without_responses_is_not_packed() -> None:
    store = store_of([10, 10])
    store.is_response[:10] = False
    store.is_response[3] = True
    sequences = PackedSequences(store, range(2), 5)
    tokens = np.concatenate(
        [sequences.sequence(index).token_ids for index in range(len(sequences))]
    )
    assert sorted(tokens.tolist()) == [*range(5), *range(10, 20)]
    assert (sequences.counts.left_out, sequences.counts.left_out_tokens) == (1, 5)
    assert (sequences.counts.split, sequences.counts.documents, sequences.counts.sequences) == (
        2,
        2,
        3,
    )


@pytest.mark.parametrize("documents", [[0], [1], []])
def test_only_the_given_documents_are_packed(documents: list[int]) -> None:
    sequences = PackedSequences(store_of([4, 4]), documents, 8)
    packed = [sequences.sequence(index) for index in range(len(sequences))]
    tokens = [token for part in packed for token in part.token_ids[part.is_response]]
    assert tokens == [token for index in documents for token in range(4 * index, 4 * index + 4)]


@pytest.mark.parametrize(("padding", "advises"), [(0.04, False), (0.06, True)])
def test_counts_come_with_advice_against_much_padding(padding: float, advises: bool) -> None:
    read = ReadCounts(
        records=9, skipped=0, dropped=0, documents=9, tokens=90, responses=45, highest_id=1
    )
    packed = PackCounts(
        sequences=2, documents=9, padding=padding, split=0, left_out=1, left_out_tokens=7
    )
    text = "\n".join(DataCounts(read=read, packed=packed).lines())
    assert "9 records read, 0 skipped; 9 documents kept\n90 tokens, 45 of them" in text
    assert "dropped (7 tokens)" in text
    assert ("data.sequence_length" in text) is advises
