"""The choice between numbers of threads while decoding, by trials of a few steps.

A process that keeps a core busy delays each operation that several threads compute together, so the
fastest number of threads on a quiet machine may be slow on a busy one.
"""

from collections.abc import Callable, Sequence

from inference.autotune.step_seconds import StepSeconds

TRIAL = 5  # steps of a trial, of which the first is not timed
SHORTEST_PAUSE, LONGEST_PAUSE = 128, 4096  # steps between two trials
SPACING = 16  # fewest steps before the first trial after a change of the machine's load
LEAST_GAIN = 1.1  # another number of threads must give this many times as many tokens per second
# If this many steps in a row take this many times as long as usual, or as short, the load of the
# machine has changed.
SURPRISES, SURPRISING = 3, 1.5


class ThreadChoice:
    """The number of threads of the next step, as an index among several numbers.

    Trials that select no other number become rarer: each pause is twice as long as the one before.
    """

    def __init__(self, count: int) -> None:
        self.index = 0
        self._count = count
        self._selected = 0
        self._spacing = SPACING
        self._pause = self._left = SHORTEST_PAUSE
        self._num_steps = 0  # since the last trial, or of the trial
        self._is_hastened = False

    @property
    def is_trial(self) -> bool:
        return self.index != self._selected

    @property
    def is_first_of_trial(self) -> bool:
        """Whether the next step is the first of a trial, which is slower than the others."""
        return self.is_trial and self._num_steps == 0

    def hasten(self) -> None:
        """Let the next trial start soon, because the load of the machine has changed."""
        if not self.is_trial:
            self._is_hastened = True
            self._left = min(self._left, max(1, self._spacing - self._num_steps))

    def after_step(
        self, rates: Callable[[], Sequence[float]], quiet_rate: Callable[[int], float]
    ) -> bool:
        """Decide on the next step, and return whether another number is now selected.

        Args:
            quiet_rate: function from an index to the tokens per second on a quiet machine, as far
                as it is known. A number that is not faster there than the selected one is now, is
                tried only after the longest pause, or if the load of the machine has changed.
        """
        if self._count == 1:
            return False
        self._num_steps += 1
        self._left -= 1
        if self._left > 0:
            return False
        estimated = rates()
        if not self.is_trial:
            other = (self._selected + 1) % self._count
            may_win = quiet_rate(other) > LEAST_GAIN * estimated[self._selected]
            if may_win or self._is_hastened or self._num_steps >= LONGEST_PAUSE:
                self._start(other, TRIAL)
            else:
                self._left = min(SHORTEST_PAUSE, LONGEST_PAUSE - self._num_steps)
            return False
        is_faster = estimated[self.index] > LEAST_GAIN * estimated[self._selected]
        if is_faster:
            self._selected, self._pause, self._spacing = self.index, SHORTEST_PAUSE, SPACING
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._spacing = min(2 * self._spacing, LONGEST_PAUSE)
        self._start(self._selected, self._pause)
        return is_faster

    def _start(self, index: int, num_steps: int) -> None:
        self.index, self._left, self._num_steps = index, num_steps, 0
        self._is_hastened = False


class TimedThreads:
    """Durations of steps with each of several numbers of threads, one of which is in use."""

    def __init__(self, timings: Sequence[StepSeconds]) -> None:
        self._timings = timings
        self._choice = ThreadChoice(len(timings))
        self._num_surprises = 0  # negative for short steps

    @property
    def timing(self) -> StepSeconds:
        return self._timings[self._choice.index]

    @property
    def is_trial(self) -> bool:
        return self._choice.is_trial

    def take(self, timing: StepSeconds, arm: int | None, seconds: float) -> bool:
        """Learn from the duration of a step, and return whether the load of the machine changed.

        Args:
            timing: the seconds of steps with the number of threads that the step used. While
                several runs decode at the same time, this need not be the current `timing`.
        """
        if timing is self.timing and self._choice.is_first_of_trial:
            return False
        ratio = timing.take(arm, seconds)
        change = (ratio > SURPRISING) - (ratio < 1 / SURPRISING)
        goes_on = change * self._num_surprises > 0
        self._num_surprises = self._num_surprises + change if goes_on else change
        if abs(self._num_surprises) < SURPRISES:
            return False
        self._num_surprises = 0
        timing.expect_change()
        self._choice.hasten()
        return True

    def after_step(self, timing: StepSeconds, rate: Callable[[StepSeconds], float]) -> bool:
        """Decide on the next step, and return whether another number of threads is now selected."""

        if timing is not self.timing:
            return False

        def rates() -> list[float]:
            return [rate(own) if own.slowness.is_known else 0.0 for own in self._timings]

        is_changed = self._choice.after_step(rates, lambda index: rate(self._timings[index].quiet))
        if self._choice.is_first_of_trial:
            self.timing.slowness.forget_load()
        return is_changed
