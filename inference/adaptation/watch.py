"""Comparison of requests before and after a change of the drafter, to undo a bad change."""

from collections import deque
from typing import Literal, NamedTuple

import numpy as np

LOOKS = (16, 32, 64)  # numbers of requests after the change at which a comparison takes place
# One-sided quantile of the normal distribution: a change without effect is undone with a
# probability of about one percent, over all comparisons.
QUANTILE = 2.6

Finding = Literal["waiting", "good", "worse"]


class _Rate(NamedTuple):
    """Tokens per decoding step, and the variance of its logarithm."""

    value: float
    variance: float


class AcceptanceWatch:
    """Compares the tau of requests before and after a change of the drafter.

    A change of the traffic at the same time may look like a worse drafter. The earlier drafter is
    then used again, which does no harm.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=LOOKS[-1])
        self._before: _Rate | None = None

    @property
    def is_watching(self) -> bool:
        """Whether a change is being watched."""
        return self._before is not None

    @property
    def is_ready(self) -> bool:
        """Whether there are enough requests to compare later ones with."""
        return len(self._recent) >= LOOKS[0]

    def changed(self, *, watch: bool) -> None:
        """Record that later requests are drafted with other weights."""
        self._before = _rate(list(self._recent)) if watch and self.is_ready else None
        self._recent.clear()

    def add(self, num_tokens: int, num_steps: int) -> Finding:
        """Add a request, and return what is known about the change.

        Args:
            num_steps: number of decoding steps, all of which have drafted.
        """
        if not num_steps:
            return "waiting"
        self._recent.append((num_tokens, num_steps))
        if self._before is None or len(self._recent) not in LOOKS:
            return "waiting"
        after = _rate(list(self._recent))
        change = np.log(after.value / self._before.value)
        if change < -QUANTILE * np.sqrt(after.variance + self._before.variance):
            self._before = None
            return "worse"
        if len(self._recent) < LOOKS[-1]:
            return "waiting"
        self._before = None
        return "good"


def _rate(requests: list[tuple[int, int]]) -> _Rate:
    """Return the ratio of sums, and the variance of its logarithm by the delta method."""
    tokens, steps = np.array(requests, float).T
    ratio = tokens.sum() / steps.sum()
    residual = tokens - ratio * steps
    count = len(requests)
    variance = residual.var(ddof=1) / count / tokens.mean() ** 2
    return _Rate(float(ratio), float(variance))
