"""Documents that are split fill rows; what must not be split stays whole."""

import numpy as np
import pytest
from helpers.training import store_of
from hypothesis import given
from hypothesis import strategies as st

from training.data.packing import PackedRows
from training.data.report import advice
from training.data.row_layout import Split
from training.data.token_store import TokenStore

LENGTH = 400
ABOUT_A_ROW = np.random.default_rng(0).integers(250, LENGTH, 200).tolist()


def chats_of(lengths: list[int]) -> TokenStore:
    """Documents that begin with a question, a fifth of each."""
    store = store_of(lengths)
    for start, length in zip(store.starts, lengths, strict=False):
        store.is_response[start : start + max(1, length // 5)] = False
    return store


def pieces_of(rows: PackedRows) -> list[tuple[list[int], list[bool]]]:
    """Tokens and response mask of each piece, checked to be a document of its own."""
    pieces = []
    for row in map(rows.row, range(len(rows))):
        for number in range(row.documents.max() + 1):
            inside = row.documents == number
            assert (row.positions[inside] == np.arange(inside.sum())).all()
            pieces.append((row.token_ids[inside].tolist(), row.is_response[inside].tolist()))
    return pieces


@pytest.mark.parametrize("split", ["texts", "all"])
def test_documents_about_as_long_as_a_row_leave_less_than_a_twentieth_of_padding(
    split: Split,
) -> None:
    store = store_of(ABOUT_A_ROW)
    whole, filled = (PackedRows(store, range(200), LENGTH, kind) for kind in ("never", split))
    assert whole.counts.padding > 0.1
    assert filled.counts.padding < 0.05
    assert filled.counts.filled_with == "texts"  # whatever else might have been split
    assert filled.counts.split > whole.counts.split
    tokens = [token for piece, _ in pieces_of(filled) for token in piece]
    assert sorted(tokens) == list(range(sum(ABOUT_A_ROW)))
    assert min(len(piece) for piece, _ in pieces_of(filled)) >= LENGTH // 40


def test_conversations_stay_whole_unless_asked_and_texts_fill_their_rows() -> None:
    chats = chats_of(ABOUT_A_ROW)
    kept = PackedRows(chats, range(200), LENGTH, "texts")
    assert (kept.counts.split, kept.counts.filled_with) == (0, None)
    split = PackedRows(chats, range(200), LENGTH, "all")
    assert split.counts.padding < 0.05
    assert split.counts.filled_with == "all"
    chats = chats_of(ABOUT_A_ROW)
    chats.is_response[chats.starts[100] :] = True  # the second half are texts
    mixed = PackedRows(chats, range(200), LENGTH, "texts")
    assert mixed.counts.filled_with == "texts"
    assert mixed.counts.padding < kept.counts.padding
    whole = {tuple(chats.document(n).token_ids) for n in range(100)}
    assert whole <= {tuple(piece) for piece, _ in pieces_of(mixed)}


@pytest.mark.parametrize(("prompts", "answers"), [((100, 200), (100, 200)), ((400, 480), (20, 30))])
def test_conversations_that_fit_a_row_are_never_cut_from_all_of_their_response(
    prompts: tuple[int, int], answers: tuple[int, int]
) -> None:
    draw = np.random.default_rng(0)
    asked, answered = draw.integers(*prompts, 300), draw.integers(*answers, 300)
    store = store_of((asked + answered).tolist())
    for start, length in zip(store.starts, asked, strict=False):
        store.is_response[start : start + length] = False
    whole, filled = (PackedRows(store, range(300), 512, kind) for kind in ("never", "all"))
    assert (filled.counts.left_out, filled.counts.left_out_tokens) == (0, 0)
    assert filled.counts.padding <= whole.counts.padding


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30),
    sequence_length=st.integers(2, 30),
    is_chat=st.booleans(),
)
def test_split_pieces_carry_their_responses_and_what_is_left_out_is_counted(
    lengths: list[int], sequence_length: int, is_chat: bool
) -> None:
    store = chats_of(lengths) if is_chat else store_of(lengths)
    rows = PackedRows(store, range(len(lengths)), sequence_length, "all")
    seen: list[int] = []
    for tokens, is_response in pieces_of(rows):
        assert np.diff(tokens).tolist() == [1] * (len(tokens) - 1)  # of one document
        assert is_response == store.is_response[tokens].tolist()
        assert any(is_response)
        seen += tokens
    assert len(set(seen)) == len(seen)
    assert len(seen) + rows.counts.left_out_tokens == sum(lengths)
    used = sum(row.documents.max() >= 0 for row in map(rows.row, range(len(rows))))
    assert used == len(rows) == rows.counts.rows
    assert rows.counts.padding == pytest.approx(
        1 - len(seen) / max(1, len(rows) * sequence_length)
    ) or (not len(rows))


@pytest.mark.parametrize("split", ["never", "texts"])
def test_a_piece_of_one_token_is_left_out_and_counted(split: Split) -> None:
    rows = PackedRows(store_of([3, 3, 3]), range(3), 2, split)
    assert (rows.counts.left_out, rows.counts.left_out_tokens) == (3, 3)
    assert all(len(tokens) == 2 for tokens, _ in pieces_of(rows))
    rows = PackedRows(store_of([LENGTH + 1]), range(1), LENGTH, split)
    assert (len(rows), rows.counts.left_out, rows.counts.padding) == (1, 1, 0)


@pytest.mark.parametrize(
    ("split", "of_texts", "of_chats"),
    [("never", "texts", "all"), ("texts", None, "all"), ("all", None, None)],
)
def test_to_split_more_is_advised_where_there_is_more_to_split(
    split: Split, of_texts: str | None, of_chats: str | None
) -> None:
    lengths = [LENGTH - 100] * 20  # of which none shares a row
    texts, chats = (
        PackedRows(store, range(20), LENGTH, split).counts
        for store in (store_of(lengths), chats_of(lengths))
    )
    assert (texts.wider_split, chats.wider_split) == (of_texts, of_chats)
    if of_chats is not None:
        assert f"data.split {of_chats}, or another data.sequence_length" in str(advice(chats))
    lonely = PackedRows(chats_of([LENGTH // 2]), [0], LENGTH, "all").counts
    assert "is padding: another data.sequence_length" in str(advice(lonely))


def test_documents_that_fit_well_are_not_split_for_the_rest() -> None:
    lengths = np.random.default_rng(0).integers(10, 60, 400).tolist()
    whole, same = (
        PackedRows(store_of(lengths), range(400), LENGTH, split) for split in ("never", "all")
    )
    assert same.counts == whole.counts
    assert same.counts.split == 0
    assert pieces_of(same) == pieces_of(whole)
