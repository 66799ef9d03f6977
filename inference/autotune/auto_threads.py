"""The number of threads of decoding steps without drafts, while the load of the machine changes."""

from collections.abc import Mapping, Sequence
from threading import Lock

from inference.autotune.costs import Costs
from inference.autotune.step_seconds import StepSeconds
from inference.autotune.thread_choice import TimedThreads
from inference.draft_tree import SequenceTree
from inference.engine.policy import AlwaysDraft, RunProgress
from inference.protocol import Budget, RequestCounter
from inference.sampling.options import Sampling


class AutoThreads:
    """Policy that never drafts, and selects the fastest number of threads."""

    request_counter: RequestCounter | None = None

    def __init__(self, costs: Costs, other_threads: Mapping[int, Costs]) -> None:
        self.costs = costs
        self.other_threads = other_threads
        self._lock = Lock()
        self._by_batch: dict[int, TimedThreads] = {}

    def new_run(self, sampling: Sampling, batch: int) -> "AutoThreadsRun":
        with self._lock:
            if batch not in self._by_batch:
                each = ((None, self.costs), *self.other_threads.items())
                timings = [StepSeconds([], costs, number) for number, costs in each]
                self._by_batch[batch] = TimedThreads(timings)
            return AutoThreadsRun(self._by_batch[batch], self._lock)

    def reset(self) -> None:
        with self._lock:
            self._by_batch.clear()

    def reproducible(self) -> AlwaysDraft:
        """Return a policy whose steps always compute with the decoder's number of threads."""
        return AlwaysDraft(None)


class AutoThreadsRun:
    """Policy of a single run without drafts."""

    autoregressive_seconds: float | None = None

    def __init__(self, threads: TimedThreads, lock: Lock) -> None:
        self._threads = threads
        self._lock = lock
        self._timing = threads.timing  # with the number of threads of the next step

    @property
    def threads(self) -> int | None:
        return self._timing.threads

    def next_budget(self, progress: RunProgress) -> Budget | None:
        return None

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
        with self._lock:
            if seconds is not None:
                self._threads.take(self._timing, None, seconds)
            self._threads.after_step(self._timing, lambda own: 1 / own.of_autoregressive)
            self._timing = self._threads.timing
