"""Texts become sequences whose continuations are learned."""

import numpy as np

from inference.adaptation.lesson import Passage
from training.loss.anchors import AnchorRule
from training.online.rows import batches, cut


def _passage(length: int, prompt: int, first: int = 1) -> Passage:
    return Passage(token_ids=tuple(range(first, first + length)), prompt_length=prompt)


def test_long_prompts_lose_their_beginnings_and_long_texts_their_ends() -> None:
    assert cut(_passage(10, 4), 10) == _passage(10, 4)
    assert cut(_passage(10, 6), 8) == _passage(8, 4, first=3)
    found = cut(_passage(20, 3), 8)
    assert found == _passage(8, 1, first=3)


def test_each_pass_has_all_texts_once_and_learns_only_continuations() -> None:
    passages = [_passage(4 + number, 2, first=10 * number + 1) for number in range(5)]
    found = list(batches(passages, 2, 3, AnchorRule("ttt", 2, 2), seed=0))
    assert [len(batch.token_ids) for batch in found] == [2, 2, 1] * 3
    rows = [row for batch in found for row in batch.token_ids.tolist()]
    for begin in (0, 5, 10):
        assert sorted(row[0] for row in rows[begin : begin + 5]) == [1, 11, 21, 31, 41]
    for batch in found:
        real = batch.documents >= 0
        assert (batch.is_response == (real & (batch.positions >= 2))).all()
        assert batch.anchors.shape[1:] == (2, 8)
    orders = [[row[0] for row in rows[begin : begin + 5]] for begin in (0, 5, 10)]
    assert len(set(map(tuple, orders))) > 1
    assert np.array_equal(
        rows,
        [
            row
            for batch in batches(passages, 2, 3, AnchorRule("ttt", 2, 2), seed=0)
            for row in batch.token_ids.tolist()
        ],
    )
