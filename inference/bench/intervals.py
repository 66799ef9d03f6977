"""Figures with their uncertainty: bootstrap intervals over prompts or rounds."""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

RESAMPLES = 2000

Item = TypeVar("Item")


class Interval(NamedTuple):
    """A figure and its 95% bootstrap interval."""

    value: float
    low: float
    high: float


class Figure(NamedTuple):
    """What a document says of one measurement; without a value where it was not taken."""

    interval: Interval | None
    goal: float | None = None
    details: Mapping[str, Any] = MappingProxyType({})

    def headline(self) -> dict[str, float | None]:
        """Return value, interval and target, as JSON holds them."""
        value = (None, None, None) if self.interval is None else self.interval
        fields = zip(("value", "low", "high"), value, strict=True)
        return dict(fields) | {"target": self.goal}


def interval(items: Sequence[Item], statistic: Callable[[Sequence[Item]], float]) -> Interval:
    """Return a statistic of independent items with its interval."""
    source = random.Random(0)
    values = sorted(statistic(source.choices(items, k=len(items))) for _ in range(RESAMPLES))
    low, high = values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES)]
    return Interval(statistic(items), low, high)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of independent values with its interval."""
    return interval(values, median)
