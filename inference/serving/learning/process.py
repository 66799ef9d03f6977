"""The process that learns from a lesson: paused while requests are decoded, ended at any time."""

import asyncio
import contextlib
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from inference.adaptation.lesson import Lesson, LessonResult, read_result


class LearningProcess:
    """A process that learns from one lesson; not thread-safe.

    The process can be stopped and continued in the middle of any computation. It is in a group of
    its own, so that an interruption from the keyboard reaches the server alone.
    """

    def __init__(self, process: Process, lesson: Lesson) -> None:
        self.lesson = lesson
        self.is_paused = False
        self._process = process
        self._started = self._resumed = time.monotonic()
        self._seconds = 0.0  # seconds of computation before the last pause
        data = lesson.model_dump_json().encode()
        self._output = asyncio.ensure_future(process.communicate(data))

    @classmethod
    async def start(cls, command: Sequence[str], lesson: Lesson) -> "LearningProcess":
        """Start a process, and write the lesson to its standard input."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, process_group=0
        )
        return cls(process, lesson)

    @property
    def is_done(self) -> bool:
        """Whether the process has ended."""
        return self._output.done()

    @property
    def seconds(self) -> float:
        """The number of seconds in which the process was not paused."""
        return self._seconds + (0.0 if self.is_paused else time.monotonic() - self._resumed)

    @property
    def age(self) -> float:
        """The number of seconds since the start, whether the process was paused or not."""
        return time.monotonic() - self._started

    def pause(self) -> None:
        """Stop the process at once, unless it is stopped or has ended."""
        if not self.is_paused and not self.is_done:
            self._seconds = self.seconds
            self.is_paused = True
            self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue, if it is stopped."""
        if self.is_paused:
            self.is_paused, self._resumed = False, time.monotonic()
            self._send(signal.SIGCONT)

    async def kill(self) -> None:
        """End the process, stopped or not, and wait for its end."""
        self._send(signal.SIGKILL)
        await asyncio.wait([self._output])

    def result(self) -> LessonResult:
        """Return the result of the process, which has ended."""
        if self._output.exception() is not None:
            return LessonResult(outcome="failed", error=str(self._output.exception()))
        return read_result(self._output.result()[0])

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
