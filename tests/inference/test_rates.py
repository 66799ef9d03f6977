"""Fading rates converge, and follow recent trials cell by cell."""

import numpy as np

from inference.rates import FadingRates

FIRST, SECOND = ((np.array([cell]),) for cell in range(2))


def _taught(rates: FadingRates, cell: int, is_success: bool, times: int = 1) -> None:
    successes, trials = np.zeros((2, *rates.shape))
    trials[cell], successes[cell] = times, is_success * times
    rates.add(successes, trials)


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
