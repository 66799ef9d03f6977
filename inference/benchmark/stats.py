"""Figures with bootstrap intervals over prompts, decoding steps or seeds.

- `resample_counts` and `interval_of` give intervals of pooled ratios, with the same resamples for
  several methods.
- `ratio` and `product` compare rates over seeds and prompts. Their intervals are also valid for few
  seeds.

For `ratio` and `product`, all arms (the compared variants of a training) are measured with the same
seeds on the same prompts. All rates of a comparison are resampled together, so effects that easy
prompts or lucky seeds have on all arms cancel. The interval is a Student's t interval of the
logarithm, so that the intervals of a / b and b / a are consistent. The variance is the sum of two
bootstrap variances: one over seeds with fixed prompts, and one over prompts with fixed seeds.

- The bootstrap variance over n units is too small by the factor (n - 1) / n; with 3 seeds, it is a
  third too small. Both bootstrap variances are corrected for this.
- A variance estimated from a few seeds is itself uncertain. If the variance over seeds dominates, a
  normal interval with 3 seeds covers 81% instead of 95%. The degrees of freedom are therefore
  estimated by Satterthwaite's formula (Biometrics Bulletin, 1946). They are S - 1 if the variance
  over S seeds dominates, and P - 1 if the variance over P prompts dominates.
- The variance that is specific to one seed on one prompt is included twice, so the interval is too
  wide rather than too narrow. Resampling seeds and prompts at once would include this variance
  three times (A. Owen, The pigeonhole bootstrap, Annals of Applied Statistics, 2007).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jakiro.errors import DataError
from jakiro.utils.settings import Settings

RESAMPLES = 2000


class Interval(NamedTuple):
    """A figure and its 95% bootstrap interval."""

    value: float
    low: float
    high: float


Floats = NDArray[np.float64]

# With fewer units (prompts, or groups decoded together), intervals exclude 1 too often by chance.
FEWEST_PROMPTS = 5


@lru_cache(maxsize=4)  # all methods of a document have the same prompts
def resample_counts(num_units: int, stream: int = 0) -> Floats:
    """Return the number of times that each resample contains each unit [resamples, units].

    Calls with the same arguments return the same numbers.

    Args:
        stream: number of the random stream; measurements of different units need different streams.
    """
    if num_units == 0:
        return np.zeros((RESAMPLES, 0))
    source = np.random.default_rng((stream, num_units))
    sampled = source.integers(num_units, size=(RESAMPLES, num_units))
    indices = sampled + num_units * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(indices.ravel(), minlength=RESAMPLES * num_units)
    resamples = counts.reshape(RESAMPLES, num_units).astype(np.float64)
    resamples.flags.writeable = False  # callers share this array
    return resamples


def sums_by_unit(parts: Iterable[tuple[str, float]], index_of: Mapping[str, int]) -> Floats:
    """Return the sum of each unit's values [units]; zero for a unit without values.

    Args:
        parts: unit and value of every sample, in any order.
    """
    sums = np.zeros(len(index_of))
    for unit, value in parts:
        sums[index_of[unit]] += value
    return sums


def pooled_ratio(top: Floats, bottom: Floats, resamples: Floats) -> Floats:
    """Return sum(top) / sum(bottom) of every resample [resamples]; NaN where the bottom is zero.

    Args:
        resamples: counts from `resample_counts`; all ratios over the same units must use the same
            counts.
    """
    return divided(resamples @ top, resamples @ bottom)


def divided(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, element by element; NaN where the bottom is zero."""
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom != 0)


def interval_of(value: float, resampled: Floats) -> Interval:
    """Return a figure with an interval that contains the central 95% of its resamples.

    Resamples that are NaN are ignored. With a single unit, all resamples are equal, so the interval
    contains only the value. With few units, the interval is too narrow: it misses the true value in
    about one of seven cases with five units, in one of nine cases with ten units, and in one of
    fifteen cases with fifty units.
    """
    known = resampled[~np.isnan(resampled)]
    if not known.size:
        return Interval(value, value, value)
    low, high = np.quantile(known, (0.025, 0.975))
    return Interval(value, float(low), float(high))


LEVEL = 0.95
_ANGLES = 100_000  # steps of a numeric integral
_SEED_STREAM = 1  # seeds are resampled independently of prompts


class Rate(NamedTuple):
    """A rate such as tokens per second: numerator and denominator, both [seeds, prompts]."""

    top: Floats
    bottom: Floats

    @property
    def pooled(self) -> float:
        """The rate over all seeds and prompts."""
        return float(self.top.sum() / self.bottom.sum())


class Ratio(Settings):
    """A ratio with its 95% interval, and the ratio for each seed."""

    value: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    @property
    def is_resolved(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1 or self.high < 1


Term = tuple[float, Rate]  # an exponent, and the rate raised to it


def ratio(top: Rate, bottom: Rate) -> Ratio:
    """Return the ratio of two rates."""
    return product([(1.0, top), (-1.0, bottom)])


def product(terms: Sequence[Term]) -> Ratio:
    """Return a product of powers of pooled rates, with its 95% interval.

    All rates are resampled together. With a single seed, only prompts are resampled.

    Raises:
        DataError: there is only one prompt, or a numerator or denominator is zero for a seed.
    """
    num_seeds, num_prompts = terms[0][1].top.shape
    _check(terms)
    every_seed, every_prompt = np.ones((1, num_seeds)), np.ones((1, num_prompts))
    center = float(_logs(terms, every_seed, every_prompt)[0])
    parts = [_corrected(_logs(terms, every_seed, resample_counts(num_prompts)), num_prompts)]
    if num_seeds > 1:
        resampled = resample_counts(num_seeds, _SEED_STREAM)
        parts.append(_corrected(_logs(terms, resampled, every_prompt), num_seeds))
    reach = _reach(parts)
    alone = _logs(terms, np.eye(num_seeds), every_prompt)
    return Ratio(
        value=math.exp(center),
        low=math.exp(center - reach),
        high=math.exp(center + reach),
        by_seed=tuple(np.exp(alone).tolist()),
    )


class _Part(NamedTuple):
    """A part of the variance, and its degrees of freedom."""

    variance: float
    freedom: int


def _corrected(resampled: Floats, num_units: int) -> _Part:
    """Return the corrected bootstrap variance of a figure over `num_units` units."""
    variance = float(np.nanvar(resampled)) * num_units / (num_units - 1)
    return _Part(variance, num_units - 1)


def _reach(parts: Sequence[_Part]) -> float:
    """Return half the length of the interval of the logarithm."""
    total = sum(part.variance for part in parts)
    if not total:  # no difference at all, as when an arm is compared with itself
        return 0.0
    freedom = total**2 / sum(part.variance**2 / part.freedom for part in parts)
    return student_quantile(freedom) * math.sqrt(total)


def student_quantile(freedom: float) -> float:
    """Return the value that |t| exceeds with probability 5%, for at least one degree of freedom.

    With t = sqrt(freedom) tan(angle), the density of the angle is proportional to
    cos(angle)^(freedom - 1).
    """
    angles = np.linspace(0.0, math.pi / 2, _ANGLES, endpoint=False)
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = float(angles[np.searchsorted(mass, LEVEL * mass[-1])])
    return math.sqrt(freedom) * math.tan(angle)


def _logs(terms: Sequence[Term], seeds: Floats, prompts: Floats) -> Floats:
    """Return the logarithm of the product for every resample [resamples]; NaN if a sum is zero.

    Args:
        seeds: number of times that every resample contains each seed [resamples or 1, seeds].
        prompts: number of times that every resample contains each prompt [resamples or 1, prompts].
    """
    logs = np.zeros(max(len(seeds), len(prompts)))
    for exponent, rate in terms:
        for sign, values in ((1, rate.top), (-1, rate.bottom)):
            sums = ((seeds @ values) * prompts).sum(axis=1)
            empty = np.full_like(sums, np.nan)
            logs += sign * exponent * np.log(sums, out=empty, where=sums > 0)
    return logs


def _check(terms: Sequence[Term]) -> None:
    if terms[0][1].top.shape[1] < 2:
        raise DataError(
            "an interval needs more than one prompt",
            expected="two or more prompts",
            got=1,
            remedy="measure on more prompts",
        )
    if any((part.sum(axis=1) <= 0).any() for _, rate in terms for part in rate):
        raise DataError(
            "a rate cannot be computed without tokens",
            expected="tokens after the first token, for every seed",
            got="none",
            remedy="measure on other prompts, or with more new tokens",
        )
