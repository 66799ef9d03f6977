"""Anchors follow the specified distribution, and stay inside their document."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jakiro.drafter_settings import DrafterSettings
from jakiro.utils.settings import validate_settings
from training.config import decoding_rule
from training.loss.anchors import (
    LONGEST,
    NEAR_SHARE,
    AnchorRule,
    root_anchors,
    sample_anchors,
    sample_blocks,
    ttt_anchors,
    with_far_anchors,
)


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
    anchors = sample_anchors(starts, num_levels, (seed,))
    index = np.arange(len(starts))
    assert (anchors >= starts).all()
    is_first = index == starts
    assert (anchors[is_first] == index[is_first]).all()
    assert (anchors[~is_first] < index[~is_first]).all()


@pytest.mark.parametrize("num_levels", [1, 2, 5])
def test_most_distances_are_uniform_over_the_levels_others_log_uniform(num_levels: int) -> None:
    count = 200_000
    anchors = sample_anchors(np.zeros(count, np.int64), num_levels, (1,))
    distance = (np.arange(count) - anchors)[LONGEST:]
    exponents = np.random.default_rng(0).uniform(0, np.log(LONGEST), 200_000)
    far = np.bincount(np.exp(exponents).round().astype(int), minlength=LONGEST + 1) / 200_000
    expected = (1 - NEAR_SHARE) * far
    expected[1 : num_levels + 1] += NEAR_SHARE / num_levels
    got = np.bincount(distance, minlength=LONGEST + 1) / len(distance)
    assert distance.max() <= LONGEST
    assert np.abs(got - expected).sum() / 2 < 0.01


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def _starts(lengths: list[int]) -> np.ndarray:
    return np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)


@given(lengths=LENGTHS, num_levels=st.integers(1, 8), seed=st.integers(0, 1000))
def test_positions_of_a_block_share_their_anchor_and_count_up_from_it(
    lengths: list[int], num_levels: int, seed: int
) -> None:
    starts = _starts(lengths)
    index, anchors = np.arange(len(starts)), sample_blocks(starts, num_levels, (seed,))
    distance = index - anchors
    assert (anchors >= starts).all()
    assert (anchors[index == starts] == starts[index == starts]).all()
    assert (distance[index > starts] >= 1).all()
    for i in index[index > starts]:
        assert distance[i] in (1, distance[i - 1] + 1)
        # Positions between an anchor and a position that uses it must use it, too.
        assert (anchors[anchors[i] + 1 : i + 1] == anchors[i]).all()


def test_blocks_are_as_long_as_the_schedule_or_log_uniformly_longer() -> None:
    length, levels, count = 3 * LONGEST, 4, 2000
    starts = np.repeat(np.arange(count) * length, length)
    distance = (np.arange(len(starts)) - sample_blocks(starts, levels, (2,))).reshape(count, length)
    periods = distance[:, 1:].max(axis=1)  # documents have room for whole blocks
    assert periods.min() == levels
    assert periods.max() <= LONGEST
    assert abs((periods == levels).mean() - NEAR_SHARE) < 0.03
    longer = np.log(periods[periods > levels])
    middle = (np.log(levels) + np.log(LONGEST)) / 2
    assert abs(longer.mean() - middle) < 0.25
    for document, period in zip(distance[:50], periods[:50], strict=True):
        resets = np.flatnonzero(document == 1)
        assert (np.diff(resets[1:]) == period).all()


@given(lengths=LENGTHS, distance=st.integers(1, 8))
def test_anchors_of_a_rollout_lie_a_fixed_distance_back_or_at_the_position_itself(
    lengths: list[int], distance: int
) -> None:
    starts = _starts(lengths)
    for i, anchor in enumerate(ttt_anchors(starts, distance)):
        assert anchor == (i - distance if i - distance >= starts[i] else i)


@pytest.mark.parametrize(
    ("drafter", "kind", "num_samples"),
    [
        ({"trunk": {"kind": "hybrid"}, "schedule": {"autoregressive_levels": 3}}, "ttt", 3),
        ({"trunk": {"kind": "feedback"}, "schedule": {"autoregressive_levels": 4}}, "ttt", 4),
        (
            {
                "trunk": {"kind": "moa"},
                "tail_layers": 1,
                "experts": {"combine": "sum"},
                "schedule": {"autoregressive_levels": 4, "parallel_levels": 0},
            },
            "blocks",
            1,
        ),
    ],
)
def test_drafters_are_measured_at_each_distance_of_decoding_equally_often(
    drafter: dict[str, object], kind: str, num_samples: int
) -> None:
    settings = validate_settings(DrafterSettings, drafter, source="the test")
    rule = decoding_rule(settings)
    assert (rule.kind, rule.num_samples) == (kind, num_samples)
    starts = np.zeros(400, np.int64)
    distance = (np.arange(400) - rule.anchors(starts, (0,)))[:, 20:]
    counts = np.bincount(distance.ravel())
    levels = settings.schedule.autoregressive_levels
    assert counts[0] == 0
    assert len(counts) == levels + 1
    assert counts[1:].max() - counts[1:].min() <= 1


FAR_STARTS = np.repeat(np.arange(400) * 50, 50)


def test_documents_with_a_far_anchor_have_it_from_one_position_on() -> None:
    is_response = np.tile(np.arange(50) >= 20, 400)
    before = AnchorRule("drafting", num_levels=3).anchors(FAR_STARTS, (5,))
    rule = AnchorRule("drafting", num_levels=3, far_share=0.5)
    after = rule.anchors(FAR_STARTS, (5,), is_response)
    assert (after == rule.anchors(FAR_STARTS, (5,), is_response)).all()
    own = (after[0] - FAR_STARTS).reshape(400, 50)
    old = (before[0] - FAR_STARTS).reshape(400, 50)
    far = [row for row in range(400) if (own[row] != old[row]).any()]
    assert 160 < len(far) < 240  # half of them
    single = [int(own[row, -1]) for row in far]
    for row, anchor in zip(far, single, strict=True):
        assert (own[row, anchor + 1 :] == anchor).all()
        assert (own[row, : anchor + 1] == old[row, : anchor + 1]).all()
    at_response = np.mean([anchor == 19 for anchor in single])
    assert 0.4 < at_response < 0.65
    others = np.array([anchor for anchor in single if anchor != 19])
    assert (others.min(), others.max()) <= (5, 48)
    assert abs(others.mean() - 24) < 5


def test_far_anchors_stay_in_their_document_and_before_their_positions() -> None:
    starts = np.repeat([0, 1, 3, 10], [1, 2, 7, 30])
    index = np.arange(40)
    for seed in range(50):
        far = with_far_anchors(ttt_anchors(starts, 1), starts, None, 1.0, (seed,))
        assert (far >= starts).all()
        assert (far[index > starts] < index[index > starts]).all()
        assert (far[index == starts] == index[index == starts]).all()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    count=st.sampled_from([None, 1, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_roots_are_random_positions_before_tokens_of_responses(
    lengths: list[int], count: int | None, seed: int
) -> None:
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    is_response = np.random.default_rng(seed).random(len(starts)) < 0.5
    anchors = root_anchors(starts, is_response, count, (seed,))
    index = np.arange(len(starts))
    roots = np.flatnonzero(anchors < index)
    assert (anchors[roots] == roots - 1).all()
    assert (np.delete(anchors, roots) == np.delete(index, roots)).all()
    same = np.append(starts[1:] == starts[:-1], False)
    possible = (index > starts) & same & np.append(is_response[1:], False)
    assert possible[roots].all()
    assert len(roots) == min(possible.sum(), len(index) if count is None else count)
    assert (root_anchors(starts, is_response, count, (seed,)) == anchors).all()
