"""Work for the engine's thread: requests with their steps, and calls of functions."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Generic, TypeVar

from inference.engine.decode_step import DecodeStep
from inference.engine.request import Request, SequenceState
from jakiro.errors import JakiroError, PromptError
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)
T = TypeVar("T")


class Job:
    """A prompt that the engine continues, once or several times.

    Steps wait in a buffer, so the engine never waits for a reader. The buffer needs no limit of its
    own, because each sequence has a largest number of tokens.

    Args:
        notify: function that is called, in the engine's thread, after each event; it must return at
            once. An exception in this function cancels the job. None for no function.
    """

    def __init__(
        self, requests: Sequence[Request], notify: Callable[[], object] | None = None
    ) -> None:
        self.sequences = [SequenceState.of(index, own) for index, own in enumerate(requests)]
        self.is_ended = False  # no more events follow
        self.is_abandoned = False  # whether the reader cannot be notified any more
        # `time.monotonic()` when the job was submitted, and when its prompt began to be read and
        # had been read
        self.submitted = self.begun = self.read = math.nan
        self._notify = notify
        self._num_running = len(self.sequences)
        self._submitted = Lock()  # held from the time when the job is submitted
        # After the end, the last event stays in the queue: an error, or None.
        self._events: SimpleQueue[DecodeStep | JakiroError | None] = SimpleQueue()

    @property
    def request(self) -> Request:
        """The request of the first continuation."""
        return self.sequences[0].request

    def claim(self) -> None:
        """Record that the job is submitted; for any thread."""
        self.submitted = time.monotonic()
        if not self._submitted.acquire(blocking=False):
            raise PromptError(
                "a job cannot be submitted twice",
                expected="a job that was not submitted yet",
                got="a job that was submitted before",
                remedy="prepare another job for the prompt",
            )

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
        self._events.put(event)
        if event is not None:
            raise event

    def poll(self) -> list[DecodeStep]:
        """Return the steps that have arrived since the last call, without waiting."""
        steps: list[DecodeStep] = []
        with suppress(Empty):
            while isinstance(event := self._events.get_nowait(), DecodeStep):
                steps.append(event)
            self._events.put(event)
            if event is not None and not steps:
                raise event
        return steps

    def _put(self, event: DecodeStep | JakiroError | None) -> None:
        self._events.put(event)
        if self._notify is None or self.is_abandoned:
            return
        try:
            self._notify()
        except Exception:
            self.is_abandoned = True
            _logger.warning("the reader of a request cannot be notified", exc_info=True)


class EngineCall(Generic[T]):
    """A function that runs at most once, and the future of its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self) -> None:
        """Run the function, unless its future was cancelled; an exception is its result, too."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """End the call without running the function."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
