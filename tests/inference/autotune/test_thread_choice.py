"""Another number of threads is tried now and then, and used while it is clearly faster."""

import itertools
from collections.abc import Sequence

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


def _indices(
    choice: ThreadChoice, count: int, rates: Sequence[float], quiet: Sequence[float] = (9.0, 9.0)
) -> list[int]:
    """Return the index that each of the next steps uses.

    Args:
        quiet: tokens per second with each number on a quiet machine.
    """
    used = []
    for _ in range(count):
        used.append(choice.index)
        choice.after_step(lambda: rates, quiet.__getitem__)
    return used


def test_a_slower_number_is_tried_ever_more_seldom() -> None:
    used = _indices(ThreadChoice(2), 4 * LONGEST_PAUSE, [1.0, 0.5])
    starts = [step for step in range(1, len(used)) if used[step] > used[step - 1]]
    assert starts[0] == SHORTEST_PAUSE
    assert all(later - earlier > TRIAL for earlier, later in itertools.pairwise(starts))
    assert sum(used) == TRIAL * len(starts) <= 0.01 * len(used)


def test_a_number_must_be_clearly_faster_to_be_used() -> None:
    assert sum(_indices(ThreadChoice(2), 2 * SHORTEST_PAUSE, [1.0, 1.05])) == TRIAL
    assert _indices(ThreadChoice(2), 2 * SHORTEST_PAUSE, [1.0, 1.2])[-1] == 1


def test_a_change_of_load_causes_a_trial_soon_but_not_all_the_time() -> None:
    choice = ThreadChoice(2)
    _indices(choice, SPACING, [1.0, 0.5])
    choice.hasten()
    assert _indices(choice, 2, [1.0, 0.5]) == [0, 1]
    _indices(choice, TRIAL - 1, [1.0, 0.5])
    choice.hasten()
    assert _indices(choice, 2 * SPACING, [1.0, 0.5]) == [0] * 2 * SPACING
    assert choice.is_first_of_trial


def test_three_surprising_steps_in_a_row_are_a_change_of_load() -> None:
    threads = TimedThreads([StepSeconds([], Costs(verify={0: 1.0}, draft={}))])
    steps = [1.0] * 30 + [2.0, 2.0, 1.0] + [2.0] * 3
    changes = [threads.take(threads.timing, None, seconds) for seconds in steps]
    assert changes == [False] * 35 + [True]
