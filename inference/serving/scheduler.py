"""Jobs, which are prompts to continue, and the order in which one engine reads and decodes them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from inference.engine.decode_step import DecodeStep
from inference.engine.lane import Lane
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from jakiro.errors import JakiroError, PromptError, ResourceError
from jakiro.utils.devices import is_out_of_memory, num_threads

Event = DecodeStep | JakiroError | None
"""A step of one continuation; or the end of all of them: an error, or None."""


class Job:
    """A prompt that the engine continues, once or several times.

    Args:
        put: function that takes each event, in the engine's thread; it must return at once. By
            default, the events wait in a queue, and iteration over the job yields the steps.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        lane: Lane,
        put: Callable[[Event], object] | None = None,
    ) -> None:
        self.lane = lane
        self.sequences = [SequenceState.of(index, one) for index, one in enumerate(requests)]
        self.is_ended = False  # no more events follow
        # `time.monotonic()` when the job was submitted, and when its prompt began to be read and
        # had been read
        self.submitted = self.begun = self.read = math.nan
        # The queue needs no limit, because each sequence has a largest number of tokens.
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._put = put or self._events.put
        self._num_running = len(self.sequences)

    @property
    def request(self) -> Request:
        return self.sequences[0].request

    def deliver(self, step: DecodeStep) -> None:
        """Pass a step of one continuation on to the reader; the last one ends the job."""
        if self.is_ended:
            return
        self._put(step)
        self._num_running -= step.finished
        if self._num_running == 0:
            self.end()

    def end(self, error: JakiroError | None = None) -> None:
        """Let the reader know that no more steps follow."""
        if self.is_ended:
            return
        self.is_ended = True
        for ticket in self.request.tickets:
            ticket.end()
        self._put(error)

    def __iter__(self) -> Iterator[DecodeStep]:
        """Yield the steps of all continuations as they arrive, until the job ends.

        Raises:
            JakiroError: the engine has stopped, or it has no memory for the prompt. The error of a
                single continuation is in its last step instead.
        """
        while isinstance(event := self._events.get(), DecodeStep):
            yield event
        self._events.put(event)  # for other readers
        if event is not None:
            raise event


class Scheduler:
    """Reads prompts in chunks between the decoding steps of lanes; not thread-safe.

    Jobs of a lane start in the order in which they were submitted.
    """

    def __init__(
        self, lanes: Sequence[Lane], on_step: Callable[[float], object] | None = None
    ) -> None:
        self.lanes = list(lanes)
        self._on_step = on_step
        self._waiting: list[Job] = []
        self._reading: tuple[Job, Prefill] | None = None
        self._running: dict[int, Job] = {}  # jobs by the `id()` of each of their sequences

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of sequences that have places."""
        return sum(len(lane.live) for lane in self.lanes)

    @property
    def is_idle(self) -> bool:
        """Whether no job waits, is being read, or is decoded."""
        return not self._waiting and self._reading is None and self.num_running == 0

    @property
    def num_bytes(self) -> int:
        """The size of the caches of all lanes in bytes."""
        return sum(lane.num_bytes for lane in self.lanes)

    def lane_of(self, requests: Sequence[Request]) -> Lane:
        """Return the lane for the continuations of a prompt; for any thread."""
        sampling = requests[0].sampling
        lane = self.lanes[-1 if sampling.do_sample else 0]
        if not lane.can_take(requests[0]):
            raise PromptError(
                "the drafter cannot draft for this way of selecting tokens", got=str(sampling)
            )
        if len(requests) > lane.places:
            raise PromptError(
                f"there are more continuations than the {lane.places} places",
                remedy="request fewer, or start the engine with more places",
            )
        return lane

    def add(self, job: Job) -> None:
        """Add a job, unless it was cancelled in the meantime."""
        if not job.is_ended:
            self._waiting.append(job)

    def cancel(self, job: Job) -> None:
        """End a job between two steps, and free its places."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self._reading is not None and self._reading[0] is job:
            self._stop_reading()
        for lane in self.lanes:
            lane.remove(job.sequences)
        self._end(job)

    def turn(self) -> bool:
        """Read a chunk of one prompt, or several short prompts, and decode a step of each lane."""
        was_busy = self._read_prompts()
        for lane in self.lanes:
            if lane.live:
                was_busy = True
                self._step(lane)
        return was_busy

    def close(self, error: JakiroError | None = None) -> None:
        jobs = [*self._waiting, *self._running.values()]
        if self._reading is not None:
            jobs.append(self._reading[0])
        self._waiting, self._reading = [], None
        for job in jobs:
            self._end(job, error)
        for lane in self.lanes:
            lane.close()

    def _read_prompts(self) -> bool:
        """Read up to a chunk of tokens of one or several prompts; return whether any were read."""
        num_read = 0
        self._begin_reading()
        while self._reading is not None and self._reading[1].fits(num_read):
            num_read += self._reading[1].chunk_size
            self._read(*self._reading)
            self._begin_reading()
        return num_read > 0

    def _begin_reading(self) -> None:
        """Begin to read the prompt of the first job for which there are places, if any."""
        if self._reading is not None:
            return
        full: list[Lane] = []  # lanes in which an earlier job waits for places
        for job in self._waiting:
            if job.lane not in full and job.lane.num_free >= len(job.sequences):
                self._open(job)
                self._waiting.remove(job)  # stays in the list if there was an exception
                return
            full.append(job.lane)

    def _open(self, job: Job) -> None:
        job.begun = time.monotonic()
        try:
            self._reading = job, job.lane.prefill_of(job.sequences)
        except (RuntimeError, MemoryError) as error:
            self._end(job, _no_memory(error))

    @torch.inference_mode()
    def _read(self, job: Job, prefill: Prefill) -> None:
        """Read a chunk of the prompt; after the last chunk, its continuations get their places."""
        try:
            with num_threads(job.lane.prefill_threads):
                prefill.read_chunk()
                if not prefill.is_complete:
                    return
                job.read = time.monotonic()
                self._running.update({id(state): job for state in job.sequences})
                steps = job.lane.start(prefill, job.sequences)
        except (RuntimeError, MemoryError) as error:
            no_memory = _no_memory(error)
            self._stop_reading()
            self._end(job, no_memory)
            return
        self._reading = None
        for step in steps:
            job.deliver(step)
        self._forget(job)

    def _step(self, lane: Lane) -> None:
        running = [state for state in lane.live if not state.is_finished]
        jobs = [self._running[id(state)] for state in running]
        started = time.monotonic()
        with num_threads(lane.threads):
            steps = lane.step()
        if self._on_step is not None:
            self._on_step(time.monotonic() - started)
        for job, step in zip(jobs, steps, strict=True):
            job.deliver(step)
        for job in jobs:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        if job.is_ended:
            self.cancel(job)

    def _end(self, job: Job, error: JakiroError | None = None) -> None:
        for state in job.sequences:
            self._running.pop(id(state), None)
        job.end(error)

    def _stop_reading(self) -> None:
        assert self._reading is not None
        self._reading[1].context.close()
        self._reading = None


def _no_memory(error: Exception) -> ResourceError:
    """Return the error of a job whose prompt needs more memory; raise one of another cause."""
    if not is_out_of_memory(error):
        raise error
    no_memory = ResourceError(
        "there is no memory to read the prompt",
        remedy="shorten the prompt, or start the engine with fewer places",
    )
    no_memory.__cause__ = error
    return no_memory
