"""The lesson that a server gives to the process that learns, and the result that it returns.

The server writes one lesson to the process's standard input, so texts are never on disk. The
process writes one result, a line of JSON, to its standard output, and ends.
"""

import asyncio
import contextlib
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jakiro.errors import DataError

TokenIds = Annotated[tuple[int, ...], Field(min_length=2)]


class Passage(BaseModel):
    """A prompt and its continuation, without its user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_ids: TokenIds
    prompt_length: int = Field(ge=1)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.token_ids[: self.prompt_length]


class Recipe(BaseModel):
    """Settings of the learning, and of the measurement of its result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)  # rank of the adapters (LoRA)
    learning_rate: float = Field(5e-4, gt=0)
    passes: int = Field(2, ge=1)  # number of times that each text is learned from
    batch_size: int = Field(8, ge=1)  # number of texts of an optimizer step
    max_length: int = Field(1024, ge=8)  # tokens of a text; longer texts are cut
    compared_tokens: int = Field(64, ge=2)  # tokens that are decoded of each held-out text
    largest_loss: float = Field(0.02, ge=0)  # share of tau that older texts may lose


class Lesson(BaseModel):
    """Everything that a process needs in order to learn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path  # folder of the versions
    number: int = Field(ge=1)  # number of the version to write
    parent: int = Field(ge=0)  # version to start from; 0 for the drafter itself
    drafter: str  # folder or hub id
    target: str | None  # folder or hub id; None for the one that the drafter names
    identity: str  # fingerprint of the drafter's own weights and of its target
    dtype: str  # dtype of the target
    device: str
    other_weights: bool = False  # whether the target's weights may differ from those in training
    tenants: tuple[str, ...]  # users whose texts these are
    learned: tuple[Passage, ...] = Field(min_length=1)
    held_out: tuple[Passage, ...] = Field(min_length=1)
    recipe: Recipe = Recipe()
    seed: int = 0


class LessonResult(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # "harmful": no better version was found, and the parent is worse than the drafter itself.
    outcome: Literal["better", "not_better", "harmful", "failed"]
    version: int | None = None  # number of the version that was written
    own: float | None = None  # tau of the drafter itself, version 0, on the held-out prompts
    before: float | None = None  # tau of the parent on the same prompts
    after: float | None = None  # tau of the new version on the same prompts
    low: float | None = None  # lower end of the 95% interval of after / before
    seconds: float = 0.0
    error: str = ""


def read_lesson(data: bytes) -> Lesson:
    try:
        return Lesson.model_validate_json(data)
    except ValidationError as error:
        # The message of pydantic would show token ids.
        raise DataError(f"the lesson cannot be read: {error.error_count()} wrong fields") from None


def read_result(data: bytes) -> LessonResult:
    """Return the result in the last line of a process's output, or a failure if there is none."""
    try:
        return LessonResult.model_validate_json((data.strip().splitlines() or [b""])[-1])
    except ValidationError:
        return LessonResult(outcome="failed", error="the process ended without a result")


class LearningProcess:
    """A process that learns from one lesson; not thread-safe.

    The process can be stopped and continued in the middle of any computation. It is in a group of
    its own, so that an interruption from the keyboard reaches the server alone.
    """

    def __init__(self, process: Process, lesson: Lesson) -> None:
        self.lesson = lesson
        self.is_paused = False
        self._process = process
        self._started = time.monotonic()
        data = lesson.model_dump_json().encode()
        self._output = asyncio.ensure_future(process.communicate(data))

    @classmethod
    async def start(cls, command: Sequence[str], lesson: Lesson) -> "LearningProcess":
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, process_group=0
        )
        return cls(process, lesson)

    @property
    def is_done(self) -> bool:
        return self._output.done()

    @property
    def age(self) -> float:
        """The number of seconds since the start, whether the process was paused or not."""
        return time.monotonic() - self._started

    def pause(self) -> None:
        """Stop the process at once, unless it is stopped or has ended."""
        if not self.is_paused and not self.is_done:
            self.is_paused = True
            self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue, if it is stopped."""
        if self.is_paused:
            self.is_paused = False
            self._send(signal.SIGCONT)

    async def kill(self) -> None:
        """End the process, stopped or not, and wait for its end."""
        self._send(signal.SIGKILL)
        await asyncio.wait([self._output])

    def result(self) -> LessonResult:
        if self._output.exception() is not None:
            return LessonResult(outcome="failed", error=str(self._output.exception()))
        return read_result(self._output.result()[0])

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
