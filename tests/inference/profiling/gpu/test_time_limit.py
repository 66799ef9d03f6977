"""Work that takes too long is stopped, and the caller's own timer goes on."""

import signal
import time
from threading import Thread

import pytest

from inference.profiling.gpu.time_limit import OutOfTime, time_limit


def test_work_is_stopped_at_its_limit_even_if_it_handles_exceptions() -> None:
    handled: list[Exception] = []

    def work() -> None:
        try:
            time.sleep(5)
        except Exception as error:  # noqa: BLE001 - this is what must not happen
            handled.append(error)

    started = time.monotonic()
    with pytest.raises(OutOfTime), time_limit(0.05):
        work()
    assert time.monotonic() - started < 4
    assert not handled


def test_work_within_its_limit_ends_normally_and_the_timer_of_the_caller_goes_on() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    with time_limit(30.0):
        result = 1 + 1
    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert result == 2
    assert (after > 0) == (before > 0)
    assert after <= before


def test_in_another_thread_there_is_no_limit() -> None:
    done: list[bool] = []

    def work() -> None:
        with time_limit(0.001):
            time.sleep(0.05)
        done.append(True)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
