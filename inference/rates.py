"""Success rates that are learned online and follow recent observations."""

from threading import Lock

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

Cells = tuple[NDArray[np.int64], ...]  # indices of cells along each axis of a grid


class FadingRates:
    """One success rate for each cell of a grid, learned in constant memory; thread-safe.

    Args:
        memory: number of later trials of the same cell after which a trial's weight is 1/e.
    """

    def __init__(self, shape: tuple[int, ...], memory: float) -> None:
        self.shape = shape
        self.memory = memory
        self._counts = np.zeros((2, *shape))  # successes, trials
        self._lock = Lock()

    def add(
        self, successes: Float64[np.ndarray, "*shape"], trials: Float64[np.ndarray, "*shape"]
    ) -> None:
        """Add new trials, and reduce the weight of earlier trials of the same cells."""
        with self._lock:
            self._counts *= np.exp(-trials / self.memory)
            self._counts[0] += successes
            self._counts[1] += trials

    def rates(
        self, cells: Cells, prior: float | NDArray[np.float64], doubt: float
    ) -> NDArray[np.float64]:
        """Return estimates of the success rates of the given cells.

        Args:
            doubt: number of trials that have the same weight as the prior.
        """
        with self._lock:
            successes, trials = (counts[cells] for counts in self._counts)
        return (successes + doubt * prior) / (trials + doubt)
