"""Another number of threads is tried now and then, and used while it is clearly faster."""

import itertools
from collections.abc import Callable, Sequence

from inference.autotune.costs import Costs
from inference.autotune.step_seconds import StepSeconds
from inference.autotune.thread_choice import (
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    SPACING,
    TRIAL,
    ThreadChoice,
    TimedThreads,
)


def _indices(choice: ThreadChoice, count: int, rates: Callable[[], Sequence[float]]) -> list[int]:
    """Return the index that each of the next steps uses."""
    used = []
    for _ in range(count):
        used.append(choice.index)
        choice.after_step(rates)
    return used


def test_a_slower_number_is_tried_ever_more_seldom() -> None:
    choice = ThreadChoice(2)
    used = _indices(choice, 4 * LONGEST_PAUSE, lambda: [1.0, 0.5])
    starts = [step for step in range(1, len(used)) if used[step] > used[step - 1]]
    assert starts[0] == SHORTEST_PAUSE
    assert all(later - earlier > TRIAL for earlier, later in itertools.pairwise(starts))
    assert sum(used) == TRIAL * len(starts) <= 0.005 * len(used)


def test_a_number_must_be_clearly_faster_to_be_used() -> None:
    assert sum(_indices(ThreadChoice(2), 2 * SHORTEST_PAUSE, lambda: [1.0, 1.05])) == TRIAL
    assert _indices(ThreadChoice(2), 2 * SHORTEST_PAUSE, lambda: [1.0, 1.2])[-1] == 1


def test_a_change_of_load_causes_a_trial_soon_but_not_all_the_time() -> None:
    choice = ThreadChoice(2)
    _indices(choice, SPACING, lambda: [1.0, 0.5])
    choice.hasten()
    assert _indices(choice, 2, lambda: [1.0, 0.5]) == [0, 1]
    _indices(choice, TRIAL - 1, lambda: [1.0, 0.5])
    choice.hasten()
    assert _indices(choice, SPACING, lambda: [1.0, 0.5]) == [0] * SPACING
    assert choice.is_first_of_trial


def test_a_single_number_is_never_left() -> None:
    choice = ThreadChoice(1)
    choice.hasten()
    assert not any(_indices(choice, 3 * SHORTEST_PAUSE, lambda: [1.0]))


def test_three_surprising_steps_in_a_row_are_a_change_of_load() -> None:
    threads = TimedThreads([StepSeconds([], Costs(verify={0: 1.0}, draft={}))])
    steps = [1.0] * 30 + [2.0, 2.0, 1.0] + [2.0] * 3
    changes = [threads.take(None, seconds, 0) for seconds in steps]
    assert changes == [False] * 35 + [True]


def test_the_first_step_of_a_trial_is_not_timed() -> None:
    costs = Costs(verify={0: 1.0}, draft={})
    threads = TimedThreads([StepSeconds([], costs, number) for number in (None, 1)])
    while threads.timing.threads is None:
        threads.take(None, 1.0, 0)
        threads.after_step(lambda timing: 1 / timing.of_autoregressive(0))
    assert not threads.take(None, 50.0, 0)
    assert not threads.timing.slowness.is_known
    threads.after_step(lambda timing: 1 / timing.of_autoregressive(0))
    threads.take(None, 3.0, 0)
    assert threads.timing.of_autoregressive(0) == 3.0
