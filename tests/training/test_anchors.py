"""Anchors follow the law that they are documented to follow, and stay inside their document."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.anchors import LONGEST, NEAR_SHARE, draw_anchors, previous_anchors


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    num_levels=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_an_anchor_lies_in_its_document_and_before_its_position(
    lengths: list[int], num_levels: int, seed: int
) -> None:
    begins = np.cumsum([0, *lengths[:-1]])
    starts = np.repeat(begins, lengths)
    anchors = draw_anchors(starts, num_levels, (seed,))
    index = np.arange(len(starts))
    assert (anchors >= starts).all()
    is_first = index == starts
    assert (anchors[is_first] == index[is_first]).all()
    assert (anchors[~is_first] < index[~is_first]).all()


@pytest.mark.parametrize("num_levels", [1, 2, 5])
def test_distances_are_uniform_up_to_the_schedule_and_log_uniform_beyond(num_levels: int) -> None:
    count = 200_000
    anchors = draw_anchors(np.zeros(count, np.int64), num_levels, (1,))
    distance = (np.arange(count) - anchors)[LONGEST:]
    exponents = np.random.default_rng(0).uniform(0, np.log(LONGEST), 200_000)
    far = np.bincount(np.exp(exponents).round().astype(int), minlength=LONGEST + 1) / 200_000
    expected = (1 - NEAR_SHARE) * far
    expected[1 : num_levels + 1] += NEAR_SHARE / num_levels
    got = np.bincount(distance, minlength=LONGEST + 1) / len(distance)
    assert distance.max() <= LONGEST
    assert np.abs(got - expected).sum() / 2 < 0.01


def test_the_same_key_draws_the_same_anchors_and_another_key_others() -> None:
    starts = np.zeros(500, np.int64)
    assert (draw_anchors(starts, 3, (7, 0, 5, 1)) == draw_anchors(starts, 3, (7, 0, 5, 1))).all()
    assert (draw_anchors(starts, 3, (7, 0, 5, 1)) != draw_anchors(starts, 3, (7, 0, 5, 2))).any()


def test_without_drafting_distances_all_tokens_but_the_last_are_verified() -> None:
    starts = np.array([0, 0, 0, 3, 3])
    assert previous_anchors(starts).tolist() == [0, 0, 1, 3, 3]
