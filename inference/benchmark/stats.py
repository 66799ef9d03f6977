"""Bootstrap intervals over prompts, groups of prompts or decoding steps."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000

Item = TypeVar("Item")


class Interval(NamedTuple):
    """A figure and its 95% bootstrap interval."""

    value: float
    low: float
    high: float


class Figure(NamedTuple):
    """The result of a measurement, as documents hold it; without an interval if not measured."""

    interval: Interval | None
    goal: float | None = None
    details: Mapping[str, Any] = MappingProxyType({})

    def headline(self) -> dict[str, float | None]:
        """Return value, interval and goal, as JSON holds them."""
        value = (None, None, None) if self.interval is None else self.interval
        fields = zip(("value", "low", "high"), value, strict=True)
        return dict(fields) | {"target": self.goal}


def interval(items: Sequence[Item], statistic: Callable[[Sequence[Item]], float]) -> Interval:
    """Return a statistic of independent items with its interval.

    Args:
        items: independent items.
        statistic: function of a list of items.
    """
    source = random.Random(0)
    values = sorted(statistic(source.choices(items, k=len(items))) for _ in range(RESAMPLES))
    low, high = values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES)]
    return Interval(statistic(items), low, high)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of independent values with its interval."""
    return interval(values, median)


Floats = NDArray[np.float64]

# With fewer units (prompts, or groups decoded together) intervals exclude 1 too often by chance.
FEWEST_PROMPTS = 5


@lru_cache(maxsize=4)  # all methods of a document have the same prompts
def resample_counts(num_units: int, stream: int = 0) -> Floats:
    """Return how often each resample holds each unit [resamples, units]; the same at every call.

    Args:
        num_units: number of independent units; every resample has as many, with replacement.
        stream: number of the random stream; measurements of different units need different ones.
    """
    if num_units == 0:
        return np.zeros((RESAMPLES, 0))
    source = np.random.default_rng((stream, num_units))
    sampled = source.integers(num_units, size=(RESAMPLES, num_units))
    indices = sampled + num_units * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(indices.ravel(), minlength=RESAMPLES * num_units)
    resamples = counts.reshape(RESAMPLES, num_units).astype(np.float64)
    resamples.flags.writeable = False  # callers share it
    return resamples


def sums_by_unit(parts: Iterable[tuple[str, float]], index_of: Mapping[str, int]) -> Floats:
    """Return the sum of each unit's parts [units]; zero for a unit without any.

    Args:
        parts: unit and value of every sample, in any order.
        index_of: indices of all units, from 0.
    """
    sums = np.zeros(len(index_of))
    for unit, value in parts:
        sums[index_of[unit]] += value
    return sums


def pooled_ratio(top: Floats, bottom: Floats, resamples: Floats) -> Floats:
    """Return sum(top) / sum(bottom) of every resample [resamples]; NaN where the bottom is zero.

    Args:
        top: numerator of each unit [units].
        bottom: denominator of each unit [units].
        resamples: counts from `resample_counts`; ratios of the same units share them.
    """
    return divided(resamples @ top, resamples @ bottom)


def divided(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, element by element; NaN where the bottom is zero.

    Args:
        top: numerators.
        bottom: denominators, of the same shape.
    """
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom != 0)


def interval_of(value: float, resampled: Floats) -> Interval:
    """Return a figure with the central 95% of its resamples.

    Resamples that are NaN do not count. With a single unit all resamples are alike, so the interval
    is the value alone. With few units it is too narrow: with five it misses the truth in about one
    of seven cases, with ten in one of nine, with fifty in one of fifteen.

    Args:
        value: figure of all units, each taken once.
        resampled: the same figure of every resample [resamples].
    """
    known = resampled[~np.isnan(resampled)]
    if not known.size:
        return Interval(value, value, value)
    low, high = np.quantile(known, (0.025, 0.975))
    return Interval(value, float(low), float(high))
