"""The number of threads of decoding steps on a CPU, at the start and while the load changes.

A small model is often fastest with a single thread, and a large model with all threads. A process
that keeps a core busy delays each operation that several threads compute together, so the fastest
number of threads on a quiet machine may be slow on a busy one.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from inference.autotune.costs import shortest_seconds, verifications
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import num_threads

TREE_NODES = 8  # number of nodes of the tree whose verification is timed
SECONDS = 0.5  # duration after which no further step is timed
# A number of threads with which steps take this many times as long as the shortest may still be the
# fastest in a loop other than this package's.
CLEARLY = 1.6

TRIAL = 5  # steps of a trial, of which the first, which is slower than others, is not timed
SHORTEST_PAUSE, LONGEST_PAUSE = 128, 4096  # steps between two trials
LEAST_GAIN = 1.1  # another number of threads must be this many times as fast
CHANGE = 1.5  # change of the load, as a ratio, after which another number is tried soon
SHORT_MEMORY, LONG_MEMORY = 3, 20  # number of recent steps from which the load is estimated

Threads = int | Literal["auto"] | None


def choose_threads(target: TargetAdapter, threads: Threads, *, drafts: bool) -> int | None:
    """Return the fastest number of threads; None for torch's current number.

    With a drafter, some steps verify a tree and others do not, so both must be fast.
    """
    if threads != "auto":
        return threads
    seconds = _seconds(target, drafts=drafts)
    return min(seconds, key=seconds.__getitem__)


def contending_threads(target: TargetAdapter, threads: Threads) -> list[int | None]:
    """Return the numbers of threads that may be the fastest in a loop without drafts."""
    if threads != "auto":
        return [threads]
    seconds = _seconds(target, drafts=False)
    return [number for number, taken in seconds.items() if taken <= CLEARLY * min(seconds.values())]


def other_threads(threads: int | None) -> list[int]:
    """Return the numbers of threads that may become faster when the load of the machine changes.

    On a busy machine, a single thread is often the fastest, and on a quiet one, all threads are.
    """
    most = torch.get_num_threads()
    if threads is None or most == 1:
        return []
    return [1] if threads > 1 else [most]


def _seconds(target: TargetAdapter, *, drafts: bool) -> dict[int | None, float]:
    """Return the expected seconds for each token with each number of threads.

    They are not kept, because they depend on what else the machine does.
    """
    most = torch.get_num_threads()
    numbers = sorted({1, max(1, most // 2), most})
    if target.device.type != "cpu" or len(numbers) == 1:
        return {None: 0.0}
    works: dict[tuple[int, int], Callable[[], object]] = {}
    for number in numbers:
        for count, step in verifications(target, (0, TREE_NODES) if drafts else (0,)).items():
            works[number, count] = num_threads(number)(step)
    taken = shortest_seconds(works, SECONDS)
    return {
        number: sum(seconds for (used, _), seconds in taken.items() if used == number)
        for number in numbers
    }


class Load:
    """The ratio of measured to modeled seconds of steps with a certain number of threads."""

    def __init__(self) -> None:
        self.recent = self.usual = 1.0
        self.is_known = True  # of a quiet machine, at first

    def take(self, ratio: float) -> bool:
        if not self.is_known:
            self.recent = self.usual = ratio
            self.is_known = True
        # A single step that was interrupted is no change.
        self.recent += (min(ratio, 2 * self.recent) - self.recent) / SHORT_MEMORY
        self.usual += (self.recent - self.usual) / LONG_MEMORY
        if 1 / CHANGE < self.recent / self.usual < CHANGE:
            return False
        self.usual = self.recent
        return True


class ThreadSwitch:
    """Switches between numbers of threads while decoding, by trials of a few steps.

    A number is tried if it may be faster than the selected one is now, soon after a change of the
    load, and otherwise seldom. Trials that select no other number become rarer: each pause is twice
    as long as the one before.
    """

    def __init__(self, numbers: Sequence[int | None]) -> None:
        self.numbers = numbers
        self.index = 0  # of the number of threads of the next step
        self._selected = 0
        # Of steps with drafts and of those without, because the drafts of some drafters take time
        # that is not modeled.
        self._loads = [(Load(), Load()) for _ in numbers]
        self._pause = self._left = SHORTEST_PAUSE
        self._num_steps = 0  # since the last trial, or of the trial
        self._must_try = False

    def learn(
        self, index: int, modeled: Sequence[float], seconds: float | None, *, is_alone: bool
    ) -> None:
        """Learn from a step, and select the number of threads of the next one.

        Args:
            index: of the number of threads that the step used. While several runs decode at the
                same time, this need not be `index`.
            modeled: seconds of such a step on a quiet machine, with each number of threads.
            seconds: duration of the step; None if it is not typical.
            is_alone: whether the step had no drafts.
        """
        if index != self.index or len(self.numbers) == 1:
            return
        is_first = self._num_steps == 0 and index != self._selected  # is slower than others
        self._num_steps += 1
        has_changed = False
        if seconds is not None and not is_first:
            has_changed = self._loads[index][is_alone].take(seconds / modeled[index])
        if has_changed and index == self._selected:
            self._left, self._must_try = min(self._left, self._pause // 8), True
        self._left -= 1
        if self._left <= 0:
            self._decide(modeled, is_alone)

    def _decide(self, modeled: Sequence[float], is_alone: bool) -> None:
        usual = self._loads[self._selected][is_alone]
        limit = modeled[self._selected] * usual.recent / LEAST_GAIN
        if self.index == self._selected:
            other = (self._selected + 1) % len(self.numbers)
            is_due = self._must_try or self._num_steps >= LONGEST_PAUSE
            if is_due or modeled[other] < limit:
                for load in self._loads[other]:
                    load.is_known = False  # but estimated from the next steps alone
                self._switch_to(other, TRIAL)
            else:
                self._left = SHORTEST_PAUSE
            return
        load = self._loads[self.index][is_alone]
        if load.is_known and modeled[self.index] * load.recent < limit:
            self._selected, self._pause = self.index, SHORTEST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._switch_to(self._selected, self._pause)

    def _switch_to(self, index: int, num_steps: int) -> None:
        self.index, self._left, self._num_steps, self._must_try = index, num_steps, 0, False
