"""Packing keeps every token, separates documents, splits those that may be, and pads little."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.training import store_of
from hypothesis import given
from hypothesis import strategies as st

from training.data.packing import PackedSequences, Split
from training.data.token_store import ReadCounts, TokenStore


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
    assert sequences.left_out == [1] * len(alone)
    pieces = sum(-(-length // sequence_length) for length in lengths) - len(alone)
    numbers = [sequences.sequence(index).documents.max() + 1 for index in range(len(sequences))]
    assert sum(numbers) == pieces
    assert sequences.num_split == sum(length > sequence_length for length in lengths)
    assert sequences.padding == pytest.approx(1 - len(seen) / (len(sequences) * sequence_length))


def test_a_report_gives_counts_and_advice_against_much_padding() -> None:
    store = store_of([5] * 9 + [11])
    counts = ReadCounts(
        records=9, skipped=0, dropped=0, documents=10, tokens=56, responses=28, highest_id=1
    )
    sequences = PackedSequences(replace(store, counts=counts), range(10), 10)
    text = "\n".join(sequences.report())
    assert text.startswith("9 records read, 0 skipped; 10 documents kept\n56 tokens, 28 of them")
    assert "packed into 6 sequences with 8.3% padding; 1 document split; 1 piece" in text
    assert "dropped (1 token)" in text
    assert "data.sequence_length" not in text
    assert "data.sequence_length" in "\n".join(PackedSequences(store, range(9), 7).report())


def test_documents_are_alone_in_their_sequences_on_request() -> None:
    sequences = PackedSequences(store_of([3, 9, 4, 12]), range(4), 10, "alone")
    counts = [(sequences.sequence(index).documents == 0).sum() for index in range(len(sequences))]
    assert counts == [3, 9, 4, 10, 2]
    assert sequences.filled_with == "alone"


LENGTH = 400
ABOUT_A_SEQUENCE = np.random.default_rng(0).integers(250, LENGTH, 200).tolist()


def chats_of(lengths: list[int]) -> TokenStore:
    """Return documents whose first fifth is a question."""
    store = store_of(lengths)
    for start, length in zip(store.starts, lengths, strict=False):
        store.is_response[start : start + max(1, length // 5)] = False
    return store


def pieces_of(sequences: PackedSequences) -> list[tuple[list[int], list[bool]]]:
    """Return tokens and response mask of each piece; check that its positions begin at 0."""
    pieces = []
    for sequence in map(sequences.sequence, range(len(sequences))):
        for number in range(sequence.documents.max() + 1):
            inside = sequence.documents == number
            assert (sequence.positions[inside] == np.arange(inside.sum())).all()
            pieces.append(
                (sequence.token_ids[inside].tolist(), sequence.is_response[inside].tolist())
            )
    return pieces


@pytest.mark.parametrize("split", ["texts", "all"])
def test_documents_about_as_long_as_a_sequence_leave_less_than_a_twentieth_of_padding(
    split: Split,
) -> None:
    store = store_of(ABOUT_A_SEQUENCE)
    whole, filled = (PackedSequences(store, range(200), LENGTH, kind) for kind in ("never", split))
    assert whole.padding > 0.1
    assert filled.padding < 0.05
    assert filled.filled_with == "texts"  # even if conversations could be split, too
    assert filled.num_split > whole.num_split
    tokens = [token for piece, _ in pieces_of(filled) for token in piece]
    assert sorted(tokens) == list(range(sum(ABOUT_A_SEQUENCE)))
    assert min(len(piece) for piece, _ in pieces_of(filled)) >= LENGTH // 40


def test_conversations_stay_whole_unless_splitting_is_chosen_and_texts_fill_sequences() -> None:
    chats = chats_of(ABOUT_A_SEQUENCE)
    kept = PackedSequences(chats, range(200), LENGTH, "texts")
    assert (kept.num_split, kept.filled_with) == (0, None)
    split = PackedSequences(chats, range(200), LENGTH, "all")
    assert split.padding < 0.05
    assert split.filled_with == "all"
    chats = chats_of(ABOUT_A_SEQUENCE)
    chats.is_response[chats.starts[100] :] = True  # the other 100 documents are texts
    mixed = PackedSequences(chats, range(200), LENGTH, "texts")
    assert mixed.filled_with == "texts"
    assert mixed.padding < kept.padding
    whole = {tuple(chats.document(n).token_ids) for n in range(100)}
    assert whole <= {tuple(piece) for piece, _ in pieces_of(mixed)}


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30),
    sequence_length=st.integers(2, 30),
    is_chat=st.booleans(),
)
def test_split_pieces_carry_their_responses_and_dropped_pieces_are_counted(
    lengths: list[int], sequence_length: int, is_chat: bool
) -> None:
    store = chats_of(lengths) if is_chat else store_of(lengths)
    sequences = PackedSequences(store, range(len(lengths)), sequence_length, "all")
    seen: list[int] = []
    for tokens, is_response in pieces_of(sequences):
        assert np.diff(tokens).tolist() == [1] * (len(tokens) - 1)  # all from one document
        assert is_response == store.is_response[tokens].tolist()
        assert any(is_response)
        seen += tokens
    assert len(set(seen)) == len(seen)
    assert len(seen) + sum(sequences.left_out) == sum(lengths)
    assert all(sequences.sequence(number).documents[0] == 0 for number in range(len(sequences)))
    assert sequences.padding == pytest.approx(
        1 - len(seen) / max(1, len(sequences) * sequence_length)
    ) or (not len(sequences))
