"""A new version must be better beyond noise, and not at the expense of older traffic."""

import numpy as np
import pytest
from helpers.adaptation import RECIPE
from helpers.models import tiny_drafter, tiny_llama

from inference.adaptation.lesson import Passage
from inference.benchmark.stats import Floats
from jakiro.target.adapter import TargetAdapter
from training.online.gate import FEWEST, compare_counts, compare_drafters


def _counts(rate: float | Floats, count: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    steps = random.binomial(64, 1 / (rate * np.ones(count)))
    return np.array([np.full(count, 64.0), steps.astype(float)])


def test_equal_drafters_pass_in_at_most_three_percent_of_the_comparisons() -> None:
    found = [
        compare_counts(_counts(2.5, 16, seed), _counts(2.5, 16, seed + 10_000))
        for seed in range(1000)
    ]
    passed = sum(result.low > 1 for result in found)
    assert passed <= 1000 * 0.035


def test_a_clearly_better_drafter_passes() -> None:
    found = [
        compare_counts(_counts(2.0, 16, seed), _counts(2.6, 16, seed + 1000)) for seed in range(100)
    ]
    assert sum(result.is_better(0.02) for result in found) > 95


def test_a_drafter_that_forgets_older_traffic_does_not_pass() -> None:
    rates = np.r_[np.full(16, 1.6), np.full(16, 4.0)]  # the older half is worse, the newer better
    found = compare_counts(_counts(2.0, 32, 0), _counts(rates, 32, 1))
    assert found.after > found.before
    assert found.older < 0.9
    assert not found.is_better(0.02)


@pytest.mark.parametrize("count", range(1, FEWEST))
def test_few_prompts_decide_nothing(count: int) -> None:
    assert not compare_counts(_counts(1.5, count, 0), _counts(4.0, count, 1)).is_better(0.02)


def test_a_drafter_is_not_better_than_itself() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    held_out = [Passage(token_ids=(1, 2, 3, number), prompt_length=3) for number in range(4)]
    found = compare_drafters(target, drafter, drafter, held_out, RECIPE)
    assert found.before == found.after > 1
    assert found.low == found.older == 1
    assert not found.is_better(0.02)
    assert all((weight == before[name]).all() for name, weight in drafter.state_dict().items())
