"""Fading rates converge, and follow recent trials cell by cell."""

import numpy as np
import pytest

from inference.rates import FadingRates

FIRST, SECOND = ((np.array([cell]),) for cell in range(2))


def _taught(rates: FadingRates, cell: int, is_success: bool, times: int = 1) -> None:
    successes, trials = np.zeros((2, *rates.shape))
    trials[cell], successes[cell] = times, is_success * times
    rates.add(successes, trials)


def test_without_trials_the_prior_is_returned() -> None:
    rates = FadingRates((2,), memory=10.0)
    assert rates.rates(FIRST, 0.3, doubt=4.0) == pytest.approx(0.3)


def test_estimates_converge_to_the_true_rate() -> None:
    rates, random = FadingRates((2,), memory=500.0), np.random.default_rng(0)
    for is_success in random.random(4000) < 0.7:
        _taught(rates, 0, bool(is_success))
    assert rates.rates(FIRST, 0.1, doubt=4.0) == pytest.approx(0.7, abs=0.06)


def test_only_cells_with_new_trials_forget_earlier_ones() -> None:
    rates = FadingRates((2,), memory=20.0)
    for cell in range(2):
        for _ in range(100):
            _taught(rates, cell, True)
    untouched = rates.rates(SECOND, 0.0, doubt=1.0)
    for _ in range(100):
        _taught(rates, 0, False)
    assert rates.rates(FIRST, 1.0, doubt=1.0) < 0.1
    assert rates.rates(SECOND, 0.0, doubt=1.0) == untouched
