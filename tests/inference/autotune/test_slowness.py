"""The load of the machine is not mistaken for an error of the cost model."""

import pytest

from inference.autotune.slowness import Slowness


def test_a_size_that_was_timed_on_a_quiet_machine_does_not_look_fast_on_a_busy_one() -> None:
    slowness = Slowness(num_arms=3)
    for load in (1.0, 3.0):
        for _ in range(30):
            slowness.take(0 if load == 1.0 else 1, load)
    quiet, busy, untimed = slowness.of_arms
    assert busy == pytest.approx(3, rel=0.1)
    # If the load were ignored, these would still be 1.
    assert min(quiet, untimed, slowness.of_autoregressive) > 0.75 * busy


def test_a_size_that_always_takes_longer_than_modelled_is_known_to_do_so() -> None:
    slowness = Slowness(num_arms=2)
    for _ in range(60):
        slowness.take(0, 1.0)
        slowness.take(1, 1.6)
        slowness.take_autoregressive(1.0)
    fast, slow = slowness.of_arms
    assert slow / fast == pytest.approx(1.6, rel=0.15)
    assert fast / slowness.of_autoregressive == pytest.approx(1, rel=0.05)


def test_a_single_interruption_hardly_counts() -> None:
    slowness = Slowness(num_arms=2)
    for _ in range(10):
        slowness.take(0, 1.0)
    slowness.take(1, 30.0)
    assert slowness.of_arms[1] < 1.5
