"""Numbers requests, so that none shares its chance with what an earlier one has taught."""

from threading import Lock


class Turns:
    """Counts the requests that teach something, from 0; threads may share it."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = Lock()

    def take(self) -> int:
        """Return the number of a request, which no other one gets until `reset`."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def reset(self) -> None:
        """Begin with 0 again, once what was learnt is forgotten."""
        with self._lock:
            self._next = 0
