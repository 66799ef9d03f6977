"""Documents that may be split fill sequences, and all others stay whole."""

import numpy as np
import pytest
from helpers.training import store_of
from hypothesis import given
from hypothesis import strategies as st

from training.data.packing import PackedSequences
from training.data.row_layout import Split
from training.data.token_store import TokenStore

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
    assert whole.counts.padding > 0.1
    assert filled.counts.padding < 0.05
    assert filled.counts.filled_with == "texts"  # even if conversations could be split, too
    assert filled.counts.split > whole.counts.split
    tokens = [token for piece, _ in pieces_of(filled) for token in piece]
    assert sorted(tokens) == list(range(sum(ABOUT_A_SEQUENCE)))
    assert min(len(piece) for piece, _ in pieces_of(filled)) >= LENGTH // 40


def test_conversations_stay_whole_unless_splitting_is_chosen_and_texts_fill_sequences() -> None:
    chats = chats_of(ABOUT_A_SEQUENCE)
    kept = PackedSequences(chats, range(200), LENGTH, "texts")
    assert (kept.counts.split, kept.counts.filled_with) == (0, None)
    split = PackedSequences(chats, range(200), LENGTH, "all")
    assert split.counts.padding < 0.05
    assert split.counts.filled_with == "all"
    chats = chats_of(ABOUT_A_SEQUENCE)
    chats.is_response[chats.starts[100] :] = True  # the other 100 documents are texts
    mixed = PackedSequences(chats, range(200), LENGTH, "texts")
    assert mixed.counts.filled_with == "texts"
    assert mixed.counts.padding < kept.counts.padding
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
    assert len(seen) + sequences.counts.left_out_tokens == sum(lengths)
    used = sum(
        sequence.documents.max() >= 0 for sequence in map(sequences.sequence, range(len(sequences)))
    )
    assert used == len(sequences) == sequences.counts.sequences
    assert sequences.counts.padding == pytest.approx(
        1 - len(seen) / max(1, len(sequences) * sequence_length)
    ) or (not len(sequences))


@pytest.mark.parametrize("split", ["never", "texts"])
def test_a_piece_of_one_token_is_dropped_and_counted(split: Split) -> None:
    sequences = PackedSequences(store_of([3, 3, 3]), range(3), 2, split)
    assert (sequences.counts.left_out, sequences.counts.left_out_tokens) == (3, 3)
    assert all(len(tokens) == 2 for tokens, _ in pieces_of(sequences))
    sequences = PackedSequences(store_of([LENGTH + 1]), range(1), LENGTH, split)
    assert (len(sequences), sequences.counts.left_out, sequences.counts.padding) == (1, 1, 0)


def test_documents_that_fit_well_are_not_split_for_the_rest() -> None:
    lengths = np.random.default_rng(0).integers(10, 60, 400).tolist()
    whole, same = (
        PackedSequences(store_of(lengths), range(400), LENGTH, split) for split in ("never", "all")
    )
    assert same.counts == whole.counts
    assert same.counts.split == 0
    assert pieces_of(same) == pieces_of(whole)
