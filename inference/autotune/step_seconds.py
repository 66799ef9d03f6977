"""The estimated seconds of a decoding step of each kind: with trees of each size, and without any.

A cost model gives the expected seconds, which measured steps then correct.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from inference.autotune.arms import TreeArm
from inference.autotune.costs import Costs

MEMORY_OF_TIMES = 20  # number of recent steps whose durations are averaged
MEMORY_OF_STEPS_ALONE = 7  # number of recent steps without drafts whose durations are known
MEMORY_OF_LOAD = 3  # number of recent steps from which the load of the machine is estimated
CLOSE_TO_1 = 4.0  # weight, in steps, of the prior that the cost model is right for a kind of step
# Durations are capped at this multiple of the expected duration before they are averaged.
OUTLIER = 2.0


class StepSeconds:
    """Seconds of each kind of step with a certain number of threads.

    Kinds are the tree sizes, by their index, and, as the last one, steps without drafts.
    """

    def __init__(self, arms: Sequence[TreeArm], costs: Costs, threads: int | None = None) -> None:
        self.threads = threads
        self.num_arms = len(arms)
        self._base = np.array([*(arm.seconds for arm in arms), costs.verify_seconds(0)])
        self.slowness = Slowness(len(self._base))
        # Ratios of measured to modeled seconds of recent steps without drafts.
        self._alone: deque[float] = deque(maxlen=MEMORY_OF_STEPS_ALONE)

    @property
    def of_arms(self) -> NDArray[np.float64]:
        return self._estimated[:-1]

    @property
    def of_autoregressive(self) -> float:
        return float(self._estimated[-1])

    @property
    def of_timed_autoregressive(self) -> float:
        """Return the median seconds of recent steps without drafts; an estimate before the first.

        In contrast to `of_autoregressive`, the durations of steps with drafts do not affect this
        value.
        """
        if not self._alone:
            return self.of_autoregressive
        return float(self._base[-1]) * median_low(self._alone)

    def expect_change(self) -> None:
        """Let the next steps outweigh the earlier ones."""
        self.slowness.expect_change()
        self._alone.clear()

    @property
    def quiet(self) -> "StepSeconds":
        """The seconds of the same steps according to the cost model alone."""
        alone = copy(self)
        alone.slowness = Slowness(len(self._base))
        return alone

    def take(self, arm: int | None, seconds: float) -> float:
        """Learn from a step, and return the ratio of its seconds to those of usual steps."""
        kind = self.num_arms if arm is None else arm
        ratio = seconds / float(self._base[kind])
        if arm is None:
            self._alone.append(ratio)
        return self.slowness.take(kind, ratio)

    @property
    def _estimated(self) -> NDArray[np.float64]:
        return self._base * self.slowness.ratios


class Slowness:
    """Ratios of measured to modeled seconds for each kind of step.

    The cost model ignores the load of the machine. The load changes quickly, and
    slows down all kinds of steps alike; it is estimated from the most recent steps. Each kind of
    step has a factor of its own, which is close to 1 until this kind has been timed several times.
    """

    def __init__(self, num_kinds: int) -> None:
        self._means = np.ones(num_kinds)  # mean ratios, divided by the load
        self._counts = np.zeros(num_kinds)
        self._load: float | None = None
        # Mean over more steps; at first, the load of a quiet machine.
        self._usual_load: float | None = 1.0

    @property
    def is_known(self) -> bool:
        """Whether a step was timed since the load of the machine was last forgotten."""
        return self._load is not None

    @property
    def ratios(self) -> NDArray[np.float64]:
        return self._factors * (1.0 if self._load is None else self._load)

    @property
    def _factors(self) -> NDArray[np.float64]:
        return (self._counts * self._means + CLOSE_TO_1) / (self._counts + CLOSE_TO_1)

    def expect_change(self) -> None:
        """Let the next ratios outweigh the earlier ones."""
        self._counts = np.minimum(self._counts, 1)
        self._usual_load = self._load

    def forget_load(self) -> None:
        """Estimate the load of the machine from the next steps alone."""
        self._load = self._usual_load = None

    def take(self, kind: int, ratio: float) -> float:
        """Learn from a step, and return its ratio relative to the usual ratio of its kind."""
        factor = float(self._factors[kind])
        if self._load is None:
            self._load = ratio / factor
        usual = self._load if self._usual_load is None else self._usual_load
        surprise = ratio / (factor * usual)
        ratio = min(ratio, OUTLIER * float(self.ratios[kind]))
        self._load += (ratio / factor - self._load) / MEMORY_OF_LOAD
        self._usual_load = usual + (ratio / factor - usual) / MEMORY_OF_TIMES
        self._counts[kind] = min(self._counts[kind] + 1, MEMORY_OF_TIMES)
        self._means[kind] += (ratio / self._load - self._means[kind]) / self._counts[kind]
        return surprise
