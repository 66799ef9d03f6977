"""Estimates of how much longer decoding steps take than the cost model predicts."""

import numpy as np
from numpy.typing import NDArray

MEMORY_OF_TIMES = 20  # number of recent steps whose durations are averaged
MEMORY_OF_LOAD = 3  # number of recent steps from which the load of the machine is estimated
CLOSE_TO_1 = 4.0  # weight, in steps, of the prior that the cost model is right for a kind of step
# Durations are capped at this multiple of the expected duration before they are averaged.
OUTLIER = 2.0


class Slowness:
    """Ratios of measured to modeled seconds for each tree size and for steps without drafts.

    The cost model ignores the batch size, the context length and the load of the machine. The load
    changes quickly, and slows down all kinds of steps alike; it is estimated from the most recent
    steps. Each kind of step has a factor of its own, which is close to 1 until this kind has been
    timed several times.

    Args:
        num_arms: number of sizes of trees.
    """

    def __init__(self, num_arms: int) -> None:
        # Steps without drafts are the last kind.
        self._means = np.ones(num_arms + 1)  # of the ratios, divided by the load
        self._counts = np.zeros(num_arms + 1)
        self._load: float | None = None

    @property
    def of_arms(self) -> NDArray[np.float64]:
        """The ratio of every size of trees."""
        return self._ratios[:-1]

    @property
    def of_autoregressive(self) -> float:
        """The ratio of a step without drafts."""
        return float(self._ratios[-1])

    @property
    def _factors(self) -> NDArray[np.float64]:
        return (self._counts * self._means + CLOSE_TO_1) / (self._counts + CLOSE_TO_1)

    @property
    def _ratios(self) -> NDArray[np.float64]:
        return self._factors * (1.0 if self._load is None else self._load)

    def expect_change(self) -> None:
        """Let the next ratios outweigh the earlier ones."""
        self._counts = np.minimum(self._counts, 1)

    def take(self, arm: int, ratio: float) -> None:
        """Learn from a step with drafts.

        Args:
            arm: index of the tree size.
            ratio: measured seconds divided by modeled seconds.
        """
        self._take(arm, ratio)

    def take_autoregressive(self, ratio: float) -> None:
        """Learn from the ratio of measured to modeled seconds of a step without drafts."""
        self._take(len(self._means) - 1, ratio)

    def _take(self, kind: int, ratio: float) -> None:
        if self._load is None:
            self._load = ratio
        ratio = min(ratio, OUTLIER * float(self._ratios[kind]))
        self._load += (ratio / float(self._factors[kind]) - self._load) / MEMORY_OF_LOAD
        self._counts[kind] = min(self._counts[kind] + 1, MEMORY_OF_TIMES)
        self._means[kind] += (ratio / self._load - self._means[kind]) / self._counts[kind]
