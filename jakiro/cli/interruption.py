"""Interruptions of measurements, whose finished part is shown and stored."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, after which the finished measurements are shown and stored."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
