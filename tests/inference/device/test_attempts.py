"""Requests that are repeated wait longer each time, and are given up in the end."""

from inference.device.attempts import Attempts


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_attempt_waits_longer_for_its_answer_up_to_a_minute() -> None:
    attempts = Attempts(patience=1000.0)
    waits = []
    for _ in range(5):
        waits.append(attempts.seconds)
        attempts.failed()
    assert waits == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_pause_that_the_server_asks_for_is_kept_but_ends_with_patience() -> None:
    clock = Clock()
    attempts = Attempts(5.0, clock)
    assert attempts.failed(asked=3.0) == 3.0
    clock.now += 3.0
    assert attempts.failed(asked=3.0) == 2.0
    clock.now += 2.0
    assert attempts.failed() is None


def test_patience_does_not_end_while_the_server_may_be_at_work() -> None:
    clock = Clock()
    attempts = Attempts(1.0, clock)
    clock.now += 60.0
    assert attempts.failed(is_at_work=True) is not None
    assert attempts.failed() is None  # as soon as the connection is refused
    clock.now += 600.0
    assert attempts.failed(is_at_work=True) is None
