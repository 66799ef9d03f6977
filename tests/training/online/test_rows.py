"""Texts become sequences whose continuations are learned."""

import pytest

from inference.adaptation.lesson import Passage
from training.loss.anchors import AnchorRule
from training.online.rows import batches, cut


def _passage(length: int, prompt: int, first: int = 1) -> Passage:
    return Passage(token_ids=tuple(range(first, first + length)), prompt_length=prompt)


@pytest.mark.parametrize(
    ("length", "prompt", "expected"),
    [
        (10, 4, (1, 10, 4)),  # it fits
        (10, 6, (3, 8, 4)),  # a long prompt loses its beginning
        (20, 3, (1, 8, 3)),  # a long continuation loses its end
        (20, 6, (3, 8, 4)),  # of two long parts, each keeps a half
        (20, 19, (13, 8, 7)),  # a short continuation stays
    ],
)
def test_texts_are_cut_to_eight_tokens(
    length: int, prompt: int, expected: tuple[int, int, int]
) -> None:
    first, count, prompt_length = expected
    found = cut(_passage(length, prompt), 8 if length > 10 or prompt > 4 else 10)
    assert found == _passage(count, prompt_length, first=first)


def test_each_pass_has_all_texts_once_and_learns_only_continuations() -> None:
    passages = [_passage(4 + number, 2, first=10 * number + 1) for number in range(5)]
    found = list(batches(passages, 2, 3, AnchorRule("ttt", 2, 2), seed=0))
    assert [len(batch.token_ids) for batch in found] == [2, 2, 1] * 3
    rows = [row.tolist() for batch in found for row in batch.token_ids]
    for begin in (0, 5, 10):
        assert sorted(row[0] for row in rows[begin : begin + 5]) == [1, 11, 21, 31, 41]
    for batch in found:
        real = batch.documents >= 0
        assert (batch.is_response == (real & (batch.positions >= 2))).all()
        assert batch.anchors.shape[1] == 2
        assert (batch.documents >= 0).any(dim=0).all()  # no column is padding in all rows
    orders = [[row[0] for row in rows[begin : begin + 5]] for begin in (0, 5, 10)]
    assert len(set(map(tuple, orders))) > 1
    again = batches(passages, 2, 3, AnchorRule("ttt", 2, 2), seed=0)
    assert rows == [row.tolist() for batch in again for row in batch.token_ids]
