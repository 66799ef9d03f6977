"""Pauses and time limits of a request that is repeated until it is answered."""

import random
import time
from collections.abc import Callable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 60.0  # seconds
_SECONDS_OF_WORK = 600.0  # largest number of seconds of a server's work for one request


class Attempts:
    """The attempts of one request.

    A connection may be lost without a sign of it, so an answer that is late is asked for again. It
    may also take long, so each attempt waits twice as long as the one before.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = _FIRST_WAIT
        self._patience = patience
        self._clock = clock
        self._started = clock()
        self._pause = _FIRST_PAUSE

    def failed(self, asked: float = 0.0, *, is_at_work: bool = False) -> float | None:
        """Return the seconds until the next attempt; None if the request is given up.

        Args:
            is_at_work: whether the server may still be working for the request, for which patience
                does not end.
        """
        wait = max(asked, self._pause * (1 + random.random()))
        patience = max(self._patience, _SECONDS_OF_WORK) if is_at_work else self._patience
        left = patience - (self._clock() - self._started)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.seconds = min(2 * self.seconds, _LONGEST_WAIT)
        return min(wait, left) if left > 0 else None
