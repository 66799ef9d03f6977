"""A time limit for work in the main thread."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """Work has reached its time limit; not an `Exception`, which the work might handle itself."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the work of a `with` block that takes longer than `seconds`.

    A call into a library is interrupted when it returns. Outside the main thread, and on systems
    without interval timers, there is no limit.

    Raises:
        OutOfTime: the time is over.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    # The timer of the caller, such as that of a test, continues afterwards.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            rest = max(left - (time.monotonic() - started), 0.001)
            signal.setitimer(signal.ITIMER_REAL, rest, interval)
