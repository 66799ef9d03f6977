"""A prompt for the engine's thread to continue, and the events of its continuations."""

import math
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from inference.engine.decode_step import DecodeStep
from inference.engine.lane import Lane
from inference.engine.request import Request, SequenceState
from jakiro.errors import JakiroError
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

Event = DecodeStep | JakiroError | None
"""A step of one continuation; or the end of all of them: an error, or None."""


class Job:
    """A prompt that the engine continues, once or several times.

    Args:
        put: function that takes each event, in the engine's thread; it must return at once. An
            exception in this function cancels the job. By default, the events wait in a queue, and
            iteration over the job yields the steps.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        lane: Lane,
        put: Callable[[Event], object] | None = None,
    ) -> None:
        self.lane = lane
        self.sequences = [SequenceState.of(index, own) for index, own in enumerate(requests)]
        self.is_ended = False  # no more events follow
        self.is_abandoned = False  # whether the reader cannot be reached any more
        # `time.monotonic()` when the job was submitted, and when its prompt began to be read and
        # had been read
        self.submitted = self.begun = self.read = math.nan
        # The queue needs no limit, because each sequence has a largest number of tokens.
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._put = put or self._events.put
        self._num_running = len(self.sequences)

    @property
    def request(self) -> Request:
        """The request of the first continuation."""
        return self.sequences[0].request

    def deliver(self, step: DecodeStep) -> None:
        """Pass a step of one continuation on to the reader; the last one ends the job."""
        if self.is_ended:
            return
        self._pass_on(step)
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
        self._pass_on(error)

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

    def _pass_on(self, event: Event) -> None:
        try:
            self._put(event)
        except Exception:
            self.is_abandoned = True
            _logger.warning("the reader of a request cannot be reached", exc_info=True)
