"""The batches of a step depend only on seed and step, and not on how the step is divided."""

from dataclasses import fields

import numpy as np
import torch

from training.data.packing import PackedSequences
from training.data.sampler import Sampler
from training.data.token_store import TokenStore
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch


def sampler(
    seed: int = 3, num_sequences: int = 7, sequences_per_step: int = 4, narrow_steps: int = 0
) -> Sampler:
    token_ids = np.arange(8 * num_sequences, dtype=np.int32)
    starts = np.arange(0, 8 * num_sequences + 1, 8)
    store = TokenStore(token_ids, np.ones(len(token_ids), np.bool_), starts, "any")
    sequences = PackedSequences(store, range(num_sequences), 8)
    rule = AnchorRule("drafting", num_levels=2, num_samples=2)
    keys = {"seed": seed, "narrow_steps": narrow_steps}
    return Sampler(sequences, sequences_per_step=sequences_per_step, rule=rule, **keys)


def assert_equal(first: Batch, second: Batch) -> None:
    for field in fields(first):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name))


def numbers(batch: Batch) -> list[int]:
    """Return the numbers of a batch's sequences, computed from their first tokens."""
    return (batch.token_ids[:, 0] // 8).tolist()


def test_parts_of_a_step_make_up_the_whole_step() -> None:
    whole = sampler().batch(5, 0, 4)
    parts = [sampler().batch(5, begin, begin + 1) for begin in range(4)]
    joined = Batch(
        *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Batch))
    )
    assert_equal(whole, joined)


def test_every_epoch_visits_every_sequence_once_in_another_order() -> None:
    source = sampler()
    visited = [number for step in range(7) for number in numbers(source.batch(step, 0, 4))]
    epochs = [visited[begin : begin + 7] for begin in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_step_may_have_more_sequences_than_there_are() -> None:
    assert sorted(numbers(sampler(num_sequences=2).batch(0, 0, 4))) == [0, 0, 1, 1]


def test_a_sequence_gets_other_anchors_in_every_epoch_and_sample() -> None:
    anchors = sampler(num_sequences=1, sequences_per_step=2).batch(0, 0, 2).anchors
    assert len({tuple(sample.tolist()) for samples in anchors for sample in samples}) == 4


def test_the_first_steps_are_narrow_and_otherwise_the_same() -> None:
    wide, narrow = sampler(), sampler(narrow_steps=2)
    kinds = [narrow.batch(step, 0, 4).is_narrow.tolist() for step in range(4)]
    assert kinds == [[True] * 4] * 2 + [[False] * 4] * 2
    assert narrow.batch(1, 2, 3).is_narrow.tolist() == [True]
    assert not wide.batch(0, 0, 4).is_narrow.any()
    assert torch.equal(wide.batch(1, 0, 4).anchors, narrow.batch(1, 0, 4).anchors)
