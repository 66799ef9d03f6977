"""What a step sees follows from seed and step alone, however it is divided."""

from dataclasses import fields

import numpy as np
import torch

from training.data.packing import PackedRows
from training.data.sampler import Sampler
from training.data.token_store import TokenStore
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch


def sampler(
    seed: int = 3, num_rows: int = 7, rows_per_step: int = 4, narrow_steps: int = 0
) -> Sampler:
    token_ids = np.arange(8 * num_rows, dtype=np.int32)
    starts = np.arange(0, 8 * num_rows + 1, 8)
    store = TokenStore(token_ids, np.ones(len(token_ids), np.bool_), starts, "any")
    rows = PackedRows(store, range(num_rows), 8)
    rule = AnchorRule("drafting", num_levels=2, draws=2)
    keys = {"seed": seed, "narrow_steps": narrow_steps}
    return Sampler(rows, rows_per_step=rows_per_step, rule=rule, **keys)


def assert_equal(one: Batch, other: Batch) -> None:
    for field in fields(one):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name))


def numbers(batch: Batch) -> list[int]:
    """Which rows a batch holds, by their first token."""
    return (batch.token_ids[:, 0] // 8).tolist()


def test_a_batch_tells_the_numbers_of_its_rows() -> None:
    batch = sampler().batch(5, 0, 4)
    assert batch.numbers.tolist() == numbers(batch)


def test_shares_of_a_step_make_up_the_whole_step() -> None:
    whole = sampler().batch(5, 0, 4)
    shares = [sampler().batch(5, begin, begin + 1) for begin in range(4)]
    joined = Batch(
        *(torch.cat([getattr(s, field.name) for s in shares]) for field in fields(Batch))
    )
    assert_equal(whole, joined)


def test_every_epoch_visits_every_row_once_in_another_order() -> None:
    one = sampler()
    visited = [number for step in range(7) for number in numbers(one.batch(step, 0, 4))]
    epochs = [visited[begin : begin + 7] for begin in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_step_may_ask_for_more_rows_than_there_are() -> None:
    assert sorted(numbers(sampler(num_rows=2).batch(0, 0, 4))) == [0, 0, 1, 1]


def test_a_row_gets_other_anchors_in_every_epoch_and_draw() -> None:
    one = sampler(num_rows=1, rows_per_step=2)
    anchors = one.batch(0, 0, 2).anchors
    assert len({tuple(draw.tolist()) for row in anchors for draw in row}) == 4


def test_another_seed_gives_another_order() -> None:
    assert numbers(sampler(seed=1).batch(0, 0, 4)) != numbers(sampler(seed=2).batch(0, 0, 4))


def test_the_first_steps_are_narrow_and_else_the_same() -> None:
    plain, narrow = sampler(), sampler(narrow_steps=2)
    kinds = [narrow.batch(step, 0, 4).is_narrow.tolist() for step in range(4)]
    assert kinds == [[True] * 4] * 2 + [[False] * 4] * 2
    assert narrow.batch(1, 2, 3).is_narrow.tolist() == [True]
    assert not plain.batch(0, 0, 4).is_narrow.any()
    assert torch.equal(plain.batch(1, 0, 4).anchors, narrow.batch(1, 0, 4).anchors)
