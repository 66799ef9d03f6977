"""Intervals of ratios of sums cover the truth, and pairing narrows them."""

import math

import numpy as np
import pytest
from helpers.studies import made_up_rate
from scipy import stats

from inference.benchmark.stats import Rate, Ratio, product, ratio, student_quantile
from jakiro.errors import DataError


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios() -> None:
    rate = Rate(np.array([[1.0, 9.0]]), np.array([[1.0, 3.0]]))
    assert product([(1.0, rate)]).value == pytest.approx(2.5)
    assert rate.pooled == 2.5
    assert ratio(rate, rate) == Ratio(value=1.0, low=1.0, high=1.0)


def test_the_interval_of_a_single_prompt_is_the_value() -> None:
    alone = product([(1.0, Rate(np.array([[6.0]]), np.array([[4.0]])))])
    assert alone.low == alone.value == alone.high == pytest.approx(1.5)


def test_the_interval_of_one_seed_covers_the_true_rate() -> None:
    prompts, source = 5, np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        bottom = source.uniform(1, 3, (1, prompts))
        top = 2.0 * bottom * source.uniform(0.5, 1.5, (1, prompts))
        rate = product([(1.0, Rate(top, bottom))])
        covered += rate.low <= 2.0 <= rate.high
    assert 0.91 <= covered / 300 <= 0.99


def simulated(number: int, truth: float, **noise: float) -> Ratio:
    """Return the tau ratio of two arms whose effects differ by `truth`, with noise."""
    random = np.random.default_rng(number)
    easiness = random.normal(0, 0.4, 20)
    arm, base = (made_up_rate(random, easiness, effect, **noise) for effect in (truth, 0.0))
    return ratio(arm, base)


def test_equal_arms_are_mostly_not_resolved() -> None:
    studies = [simulated(number, truth=0.0) for number in range(100)]
    assert sum(study.is_resolved for study in studies) <= 10


def test_a_tenth_is_found_in_nearly_all_studies() -> None:
    studies = [simulated(number, truth=math.log(1.1)) for number in range(60)]
    assert sum(study.low > 1 for study in studies) >= 0.95 * len(studies)


@pytest.mark.parametrize(
    "noise",
    [
        {"seed_noise": 0.05, "prompt_noise": 0.01, "cell_noise": 0.01},
        {"seed_noise": 0.003, "prompt_noise": 0.2, "cell_noise": 0.01},
        {"seed_noise": 0.02, "prompt_noise": 0.08, "cell_noise": 0.02},
        {"seed_noise": 0.0, "prompt_noise": 0.01, "cell_noise": 0.2},
    ],
    ids=["seeds-dominate", "prompts-dominate", "both-matter", "cells-dominate"],
)
def test_intervals_of_three_seeds_and_twenty_prompts_cover_the_truth(
    noise: dict[str, float],
) -> None:
    truth = math.log(1.05)
    studies = [simulated(number, truth, **noise) for number in range(160)]
    covered = sum(study.low < math.exp(truth) < study.high for study in studies)
    assert covered >= 0.9 * len(studies)


def test_pairing_removes_the_common_effect_of_prompts() -> None:
    random = np.random.default_rng(0)
    easiness = random.normal(0, 0.5, 20)
    arm, base = (made_up_rate(random, easiness) for _ in range(2))
    shuffled = Rate(*(part[:, random.permutation(20)] for part in base))
    paired, unpaired = ratio(arm, base), ratio(arm, shuffled)
    assert unpaired.value == pytest.approx(paired.value)
    assert unpaired.high - unpaired.low > 3 * (paired.high - paired.low)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 2.7, 10.0, 300.0])
def test_student_quantiles_are_those_of_scipy(freedom: float) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


def test_a_rate_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="a rate cannot be computed without tokens"):
        product([(1.0, Rate(np.zeros((2, 5)), np.ones((2, 5))))])
