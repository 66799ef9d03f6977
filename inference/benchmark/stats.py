"""Ratios of pooled rates with 95% intervals over prompts and seeds; the package has no others.

Each prompt and each seed of a rate (such as tokens per second) has a numerator and a denominator.
All rates of a comparison are measured with the same seeds on the same prompts, so effects that easy
prompts or lucky seeds have on all of them cancel. The interval is a Student's t interval of the
logarithm, so that the intervals of a / b and b / a are consistent. The variance of the logarithm is
the sum of two parts, one over prompts and one over seeds, and each part is the bootstrap variance
to first order: the sum of the squares of what each unit adds to the logarithm.

- The bootstrap variance over n units is too small by the factor (n - 1) / n; with 3 seeds, it is a
  third too small. Both parts are corrected for this.
- A variance estimated from a few seeds is itself uncertain. If the variance over seeds dominates, a
  normal interval with 3 seeds covers 81% instead of 95%. The degrees of freedom are therefore
  estimated by Satterthwaite's formula (Biometrics Bulletin, 1946). They are S - 1 if the variance
  over S seeds dominates, and P - 1 if the variance over P prompts dominates.
- The variance that is specific to one seed on one prompt is included twice, so the interval is too
  wide rather than too narrow. Resampling seeds and prompts at once would include this variance
  three times (A. Owen, The pigeonhole bootstrap, Annals of Applied Statistics, 2007).
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jakiro.errors import DataError
from jakiro.utils.settings import Settings

Floats = NDArray[np.float64]

# With fewer prompts, or groups of prompts decoded together, tables show no intervals.
FEWEST_PROMPTS = 5
LEVEL = 0.95
_ANGLES = 100_000  # steps of a numeric integral

# Fields of a sample whose ratio is a rate.
TAU = ("decoded", "target_forwards")  # tokens per forward pass of the target, both after prefill
SPEED = ("tokens", "seconds")
DRAFTING = ("draft", "target_forwards")  # seconds of drafting in each forward pass


class Rate(NamedTuple):
    """A rate such as tokens per second: numerator and denominator, both [seeds, prompts]."""

    top: Floats
    bottom: Floats

    @property
    def pooled(self) -> float:
        """The rate over all seeds and prompts."""
        return float(self.top.sum() / self.bottom.sum())


def rate_of(
    trainings: Sequence[Sequence[object]],
    fields: tuple[str, str],
    units: Sequence[Hashable],
    unit: str = "prompt",
) -> Rate:
    """Return the rate of two fields of samples, summed over the samples of each unit.

    Args:
        trainings: samples of each training of a method.
        units: names of all prompts or groups, in the same order for rates that are compared.
        unit: field of a sample with the name of its unit.

    Raises:
        DataError: the samples of a training are not those of all units.
    """
    index_of = {name: index for index, name in enumerate(units)}
    sums: dict[str, Floats] = {name: np.zeros((len(trainings), len(units))) for name in fields}
    for number, samples in enumerate(trainings):
        if {getattr(sample, unit) for sample in samples} != index_of.keys():
            raise DataError(
                "methods or seeds were measured on different prompts, and cannot be compared "
                "prompt by prompt; measure again, with the same prompt file and number of prompts"
            )
        for sample in samples:
            for name, values in sums.items():
                values[number, index_of[getattr(sample, unit)]] += getattr(sample, name)
    return Rate(*sums.values())


class Ratio(Settings):
    """A ratio with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def is_resolved(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1 or self.high < 1

    def shown(self, decimals: int) -> str:
        """Return the ratio with its interval in brackets."""
        value, low, high = (f"{x:.{decimals}f}" for x in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


def ratio(top: Rate, bottom: Rate) -> Ratio:
    """Return the ratio of two rates."""
    return product([(1.0, top), (-1.0, bottom)])


def product(terms: Sequence[tuple[float, Rate]]) -> Ratio:
    """Return a product of powers of pooled rates, with its 95% interval.

    The interval covers only prompts if there is one seed, only seeds if there is one prompt, and
    nothing but the value if there is one of each.

    Args:
        terms: exponents, and the rates that are raised to them.

    Raises:
        DataError: a numerator or denominator is zero for a seed.
    """
    parts = [
        (sign * exponent, values)
        for exponent, rate in terms
        for sign, values in ((1, rate.top), (-1, rate.bottom))
    ]
    if any((values.sum(axis=1) <= 0).any() for _, values in parts):
        raise DataError(
            "a rate cannot be computed without tokens after the first one, for every seed",
            remedy="measure on other prompts, or with more new tokens",
        )
    # With a single division, x / x is exactly 1.
    above, below = (
        math.prod(values.sum() ** abs(power) for power, values in parts if power * sign > 0)
        for sign in (1, -1)
    )
    value = float(above / below)
    influence = sum(exponent * values / values.sum() for exponent, values in parts)
    reach = math.exp(_reach([influence.sum(axis=0), influence.sum(axis=1)]))
    return Ratio(value=value, low=value / reach, high=value * reach)


def _reach(influences: Sequence[Floats]) -> float:
    """Return half the length of the interval of the logarithm.

    Args:
        influences: what each unit adds to the logarithm, for each kind of units.
    """
    variances = [
        (float((added**2).sum()) * len(added) / (len(added) - 1), len(added) - 1)
        for added in influences
        if len(added) > 1
    ]
    total = sum(variance for variance, _ in variances)
    if not total:  # no difference at all, as when an arm is compared with itself
        return 0.0
    freedom = total**2 / sum(variance**2 / freedom for variance, freedom in variances)
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
