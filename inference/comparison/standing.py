"""Classifies methods as faster, slower or not distinguishable from the baseline."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from inference.bench.intervals import Interval
from inference.comparison.bootstrap import (
    FEWEST_PROMPTS,
    Floats,
    divided,
    draws,
    interval_of,
    pooled_ratio,
    sums_by_unit,
)
from inference.comparison.document import MethodFigures, SampleRecord

Standing = Literal["faster", "slower", "open", "too few prompts"]


def num_groups(samples: Iterable[SampleRecord]) -> int:
    """Return how many groups were decoded together: one by one, how many prompts."""
    return len({one.group for one in samples})


def has_too_few(samples: Iterable[SampleRecord]) -> bool:
    """Return whether there are too few independent samples for an interval."""
    return num_groups(samples) < FEWEST_PROMPTS


def standing(one: MethodFigures) -> Standing:
    """Return where the interval of a method's speed-up lies: above 1, below 1, or around 1."""
    if has_too_few(one.samples):
        return "too few prompts"
    if one.speedup_low > 1:
        return "faster"
    return "slower" if one.speedup_high < 1 else "open"


def relative_speed(one: MethodFigures, other: MethodFigures) -> Interval:
    """Return the ratio of two methods' speeds with an interval over shared resamples.

    Both methods decoded the same prompts, so that their difficulty cancels.
    """
    groups = sorted({str(sample.group) for each in (one, other) for sample in each.samples})
    place_of = {group: place for place, group in enumerate(groups)}
    all_once = np.ones((1, len(groups)))
    value, resampled = (
        divided(_speed(one, place_of, each), _speed(other, place_of, each))
        for each in (all_once, draws(len(groups)))
    )
    return interval_of(float(value[0]), resampled)


def leader(rivals: Sequence[MethodFigures]) -> MethodFigures | None:
    """Return the fastest of the methods that are shown to be faster than the baseline."""
    faster = [one for one in rivals if standing(one) == "faster"]
    return max(faster, key=lambda one: one.speedup, default=None)


def unsettled(leading: MethodFigures, rivals: Sequence[MethodFigures]) -> list[MethodFigures]:
    """Return the methods that the leading one is not shown to be faster than."""
    return [
        one
        for one in rivals
        if one is not leading
        and (has_too_few(one.samples) or not relative_speed(leading, one).low > 1)
    ]


def fastest(rivals: Sequence[MethodFigures]) -> MethodFigures | None:
    """Return the method that is shown to be faster than the baseline and than all others."""
    leading = leader(rivals)
    return None if leading is None or unsettled(leading, rivals) else leading


def _speed(figures: MethodFigures, place_of: dict[str, int], resamples: Floats) -> Floats:
    tokens = ((str(one.group), float(one.tokens)) for one in figures.samples)
    seconds = ((str(one.group), one.seconds) for one in figures.samples)
    return pooled_ratio(sums_by_unit(tokens, place_of), sums_by_unit(seconds, place_of), resamples)
