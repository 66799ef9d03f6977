"""Seconds of steps follow the load of the machine, the kind of step and the context."""

import pytest

from inference.autotune.arms import TreeArm
from inference.autotune.costs import Costs
from inference.autotune.step_seconds import Slowness, StepSeconds
from inference.protocol import Budget


def test_a_size_that_was_timed_on_a_quiet_machine_does_not_look_fast_on_a_busy_one() -> None:
    slowness = Slowness(num_kinds=4)
    for load in (1.0, 3.0):
        for _ in range(30):
            slowness.take(0 if load == 1.0 else 1, load)
    quiet, busy, untimed, autoregressive = slowness.ratios
    assert busy == pytest.approx(3, rel=0.1)
    # If the load were ignored, these would still be 1.
    assert min(quiet, untimed, autoregressive) > 0.75 * busy


def test_a_size_that_always_takes_longer_than_modelled_is_known_to_do_so() -> None:
    slowness = Slowness(num_kinds=3)
    for _ in range(60):
        for kind, ratio in enumerate((1.0, 1.6, 1.0)):
            slowness.take(kind, ratio)
    fast, slow, autoregressive = slowness.ratios
    assert slow / fast == pytest.approx(1.6, rel=0.15)
    assert fast / autoregressive == pytest.approx(1, rel=0.05)


def test_longer_steps_count_until_the_machine_is_quiet() -> None:
    seconds = StepSeconds([TreeArm(Budget(8), (1, 8, 1), 2.5)], Costs(verify={0: 1.0}, draft={}))
    assert seconds.of_arms[0] == 2.5
    for _ in range(9):
        seconds.take(None, 5.0)
    assert seconds.of_autoregressive > 4
    assert seconds.quiet.of_autoregressive == 1.0
    assert seconds.quiet.of_arms[0] == 2.5
