"""Intervals of ratios of sums over prompts: they cover the truth, and pairing narrows them."""

from collections.abc import Callable

import numpy as np
import pytest

from inference.benchmark.stats import (
    RESAMPLES,
    divided,
    interval_of,
    pooled_ratio,
    resample_counts,
    sums_by_unit,
)


def test_every_resample_holds_as_many_units_as_there_are() -> None:
    resamples = resample_counts(7)
    assert resamples.shape == (RESAMPLES, 7)
    assert (resamples.sum(axis=1) == 7).all()
    assert resamples.mean(axis=0) == pytest.approx(np.ones(7), abs=0.1)
    assert resamples.var() == pytest.approx(6 / 7, abs=0.05)  # the variance of a binomial count


def test_resamples_are_the_same_at_every_call_and_others_in_another_stream() -> None:
    first = resample_counts(5).copy()
    resample_counts.cache_clear()
    assert (resample_counts(5) == first).all()
    assert np.corrcoef(first.ravel(), resample_counts(5, stream=1).ravel())[0, 1] < 0.05
    with pytest.raises(ValueError, match="read-only"):
        resample_counts(5)[0, 0] = 2.0


def test_parts_are_summed_by_unit() -> None:
    parts = [("b", 1.0), ("a", 2.0), ("b", 4.0)]
    assert sums_by_unit(parts, {"a": 0, "b": 1, "c": 2}).tolist() == [2.0, 5.0, 0.0]


def test_a_ratio_is_of_sums_not_a_mean_of_ratios() -> None:
    top, bottom = np.array([1.0, 9.0]), np.array([1.0, 3.0])
    resamples = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert pooled_ratio(top, bottom, resamples).tolist() == [2.5, 1.0]


def test_a_zero_denominator_is_left_out_without_a_warning() -> None:
    ratios = pooled_ratio(np.array([1.0, 1.0]), np.array([0.0, 2.0]), resample_counts(2))
    assert np.isnan(ratios).any()
    interval = interval_of(1.0, ratios)
    assert (interval.low, interval.high) == (0.5, 1.0)  # the second unit twice; both units
    nothing = divided(np.zeros(4), np.zeros(4))
    assert interval_of(3.0, nothing) == (3.0, 3.0, 3.0)
    assert interval_of(3.0, pooled_ratio(np.zeros(0), np.zeros(0), resample_counts(0))) == (
        3.0,
        3.0,
        3.0,
    )


def test_the_interval_of_a_single_unit_is_the_value() -> None:
    ratios = pooled_ratio(np.array([6.0]), np.array([4.0]), resample_counts(1))
    assert interval_of(1.5, ratios) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(("units", "fewest"), [(10, 0.84), (40, 0.9)])
def test_the_interval_covers_the_true_ratio(units: int, fewest: float) -> None:
    covered = _share(_covers_the_truth, units)
    assert fewest <= covered <= 0.99


def _covers_the_truth(source: np.random.Generator, units: int) -> bool:
    bottom = source.uniform(1, 3, units)
    top = 2.0 * bottom * source.uniform(0.5, 1.5, units)
    ratios = pooled_ratio(top, bottom, resample_counts(units))
    interval = interval_of(float(top.sum() / bottom.sum()), ratios)
    return interval.low <= 2.0 <= interval.high


def _share(trial: Callable[[np.random.Generator, int], bool], units: int) -> float:
    source = np.random.default_rng(3)
    return sum(trial(source, units) for _ in range(300)) / 300


def test_pairing_narrows_the_interval_of_two_measurements() -> None:
    source = np.random.default_rng(0)
    tokens, hardness = np.full(30, 100.0), source.lognormal(0, 0.5, 30)
    first, second = (hardness * source.lognormal(0, 0.02, 30) for _ in range(2))

    def width(stream: int) -> float:
        slow = pooled_ratio(tokens, first, resample_counts(30))
        fast = pooled_ratio(tokens, second, resample_counts(30, stream))
        interval = interval_of(1.0, divided(fast, slow))
        return interval.high - interval.low

    assert width(stream=0) < width(stream=1) / 5
