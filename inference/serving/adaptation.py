"""Adaptation of a server's drafter: it collects texts, and learns and changes when idle.

A drafter is changed only while no request is decoded. Each request is therefore decoded with one
version from its beginning to its end.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from inference.adaptation.lesson import LearningProcess, Lesson, LessonResult
from inference.adaptation.traffic import TrafficRing
from inference.adaptation.versions import VersionFolder, lock_of
from inference.adaptation.weights import identity_of_drafter
from inference.protocol import RequestCounter
from inference.serving.engine_thread import LoadedModel
from inference.serving.reply import Reply
from inference.serving.settings import ServeSettings
from inference.serving.telemetry import Telemetry
from inference.serving.used_version import UsedVersion, drafter_that_learns
from jakiro.utils.files import ensure_writable_folder
from jakiro.utils.logs import get_logger
from jakiro.utils.wording import dtype_name

_logger = get_logger(__name__)

KEPT = 5  # number of versions that are kept
_FEWEST_HELD_OUT = 4  # smallest number of held-out texts of a lesson
_MOST_LEARNED, _MOST_HELD_OUT = 256, 32  # largest numbers of texts of a lesson
_POLL_SECONDS = 0.1
_SECONDS_AFTER_ERROR = 5.0

Why = Literal["better", "worse", "purged"]


class Learner(NamedTuple):
    """The program that learns, and the models that it loads."""

    command: tuple[str, ...]
    drafter: str
    target: str | None = None
    other_weights: bool = False


class _Change(NamedTuple):
    number: int  # number of the version to use; 0 for the drafter's own weights
    why: Why


class Adaptation:
    """The adaptation of one engine's drafter; belongs to the event loop once it is made."""

    def __init__(
        self,
        model: LoadedModel,
        settings: ServeSettings,
        learner: Learner,
        telemetry: Telemetry,
        is_busy: Callable[[], bool],
    ) -> None:
        self._model, self._learner = model, learner
        self._is_busy = is_busy
        self._telemetry, self._settings = telemetry, settings
        target = model.engine.decoder.target
        drafter = drafter_that_learns(model)
        # What is learned outlives this process, and so must the uniqueness of the numbers.
        drafter.request_counter = RequestCounter(first=secrets.randbits(62))
        self._resources = ExitStack()
        identity = identity_of_drafter(drafter.model, target.spec.fingerprint, target.dtype)
        self._folder = VersionFolder(self._open_folder() / identity, identity)
        self._folder.clean(KEPT)
        self._used = UsedVersion(model, drafter, self._folder)
        self._ring = TrafficRing(settings.adapt_tokens, 3600 * settings.adapt_hours)
        self._process: LearningProcess | None = None
        self._change: _Change | None = None  # change that is due as soon as the server is idle
        self._admits = asyncio.Event()
        self._admits.set()
        self._num_admitted = 0  # number of requests with the version in use
        self._num_purges = 0
        self._num_new = 0  # number of texts since the last lesson
        self._idle_since: float | None = None
        watch = telemetry.watch
        watch("adapt_version", "Version of the drafter; 0 for its own.", lambda: self.version)
        watch("adapt_tokens", "Tokens of recent texts.", lambda: self._ring.num_tokens)
        watch("adapt_learning", "Whether the drafter is learning.", lambda: self._is_learning)

    @property
    def version(self) -> int:
        """The number of the version in use; 0 for the drafter's own weights."""
        return self._used.number

    @property
    def _is_learning(self) -> bool:
        return self._process is not None and not self._process.is_paused

    def pause(self) -> None:
        """Stop learning, because a request has arrived."""
        self._idle_since = None
        if self._process is not None:
            self._process.pause()

    @asynccontextmanager
    async def admitted(self, seconds: float) -> AsyncIterator[None]:
        """Wait while a change waits for the end of earlier requests; none takes place in the block.

        Raises:
            TimeoutError: the change did not take place in time.
        """
        async with asyncio.timeout(seconds):
            await self._admits.wait()
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1

    def record(self, reply: Reply) -> None:
        """Keep the texts of a complete reply for a lesson, if that is allowed."""
        if not reply.options.may_learn:
            return
        for job in reply.jobs:
            for state in job.sequences:
                prompt = len(state.request.token_ids)
                self._num_new += self._ring.add(reply.user, state.token_ids, prompt)

    async def purge(self, tenant: str) -> tuple[int, int]:
        """Forget the texts of a tenant, and all versions that have learned from them.

        Returns:
            The numbers of texts and of versions.
        """
        self._num_purges += 1
        num_texts = self._ring.purge(tenant)
        process = self._process
        if process is not None and self._may_teach(process.lesson, tenant):
            self._process = None
            await process.kill()
            self._telemetry.lessons.labels("purged").inc()
        numbers = self._folder.numbers
        removed = [number for number in numbers if self._folder.may_know(number, tenant)]
        current = self.version if self._change is None else self._change.number
        if current in removed:  # also if they cannot be removed
            earlier = (number for number in {*numbers} - {*removed} if number < current)
            self._change = _Change(max(earlier, default=0), "purged")
        for number in removed:
            self._folder.remove(number)
        return num_texts, len(removed)

    async def run(self) -> None:
        """Learn and change the drafter whenever the server is idle, until this task is cancelled.

        An error ends a lesson, and never the server.
        """
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self._continue()
            except Exception:
                _logger.exception("adaptation continues after an error")
                if (change := self._change) is not None:
                    # The drafter's own weights, version 0, can always be used.
                    self._change = None if change.why == "better" else change._replace(number=0)
                self._admits.set()
                await asyncio.sleep(_SECONDS_AFTER_ERROR)

    async def close(self) -> None:
        self._admits.set()
        if self._process is not None:
            await self._process.kill()
        self._resources.close()

    async def _continue(self) -> None:
        self._ring.expire()  # also if no text is added any more
        await self._end_long_lesson()
        if self._process is not None and self._process.is_done:
            self._finish(self._process.result())
        if self._change is not None:
            self._admits.clear()
            await self._apply(self._change)
        if self._change is None:
            self._admits.set()
        if self._is_busy():
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        if self._change is None and now - self._idle_since >= self._settings.adapt_idle_seconds:
            await self._learn()

    def _may_teach(self, lesson: Lesson, tenant: str) -> bool:
        """Whether a lesson has texts of a tenant, or starts from a version that knows them."""
        return tenant in lesson.tenants or self._folder.may_know(lesson.parent, tenant)

    async def _learn(self) -> None:
        """Continue a lesson, or begin one if there are enough new texts."""
        process = self._process
        if process is not None:
            process.resume()
            return
        lesson = self._next_lesson()
        if lesson is None:
            return
        self._num_new = 0
        _logger.info("learning from %d texts", len(lesson.learned))
        num_purges = self._num_purges
        process = await LearningProcess.start(self._learner.command, lesson)
        if self._num_purges != num_purges:  # the texts of the lesson may be among the purged ones
            await process.kill()
            return
        self._process = process
        if self._is_busy():
            process.pause()

    async def _end_long_lesson(self) -> None:
        process = self._process
        if process is not None and process.age > 3600 * self._settings.adapt_hours:
            await process.kill()

    def _next_lesson(self) -> Lesson | None:
        if self._num_new < self._settings.adapt_every:
            return None
        traffic = self._ring.traffic(_MOST_LEARNED, _MOST_HELD_OUT)
        if not traffic.learned or len(traffic.held_out) < _FEWEST_HELD_OUT:
            return None
        target = self._model.engine.decoder.target
        learner, folder = self._learner, self._folder
        return Lesson(
            folder=folder.path,
            number=max([self.version, *folder.numbers]) + 1,
            parent=self.version,
            drafter=learner.drafter,
            target=learner.target,
            identity=folder.identity,
            dtype=dtype_name(target.dtype),
            device=str(target.device),
            other_weights=learner.other_weights,
            tenants=traffic.tenants,
            learned=traffic.learned,
            held_out=traffic.held_out,
            seed=secrets.randbits(31),
        )

    def _finish(self, result: LessonResult) -> None:
        process, self._process = self._process, None
        assert process is not None
        number, parent = process.lesson.number, process.lesson.parent
        self._telemetry.lessons.labels(result.outcome).inc()
        if result.outcome == "failed":
            _logger.warning("a lesson has failed: %s", result.error)
            self._folder.remove(number)  # if the process was killed after it had written a version
            return
        _logger.info(
            "learned for %.0f s: tau %.2f before, %.2f after, a ratio of at least %.3f",
            result.seconds,
            result.before or 0.0,
            result.after or 0.0,
            result.low or 0.0,
        )
        is_current = parent == self.version and self._change is None
        if result.outcome == "harmful" and is_current:
            _logger.warning("version %d is worse than the drafter itself: it forgets all", parent)
            self._change = _Change(0, "worse")
            for version in self._folder.numbers:
                self._folder.remove(version)
        elif result.outcome == "better" and is_current:
            self._change = _Change(number, "better")
        elif result.outcome == "better":  # the parent is no longer in use
            self._folder.remove(number)

    async def _apply(self, change: _Change) -> None:
        """Change the weights, unless a request is decoded; it is then tried again."""
        if self._num_admitted:
            return
        version = await asyncio.to_thread(self._used.read, change.number)
        if self._change != change or self._num_admitted:
            return
        if not await self._used.replace(change.number, version):
            return
        self._telemetry.changes.labels(change.why).inc()
        if self._change == change:
            self._change = None
        if self._process is None:
            self._folder.clean(KEPT)
        _logger.info("drafting with version %d (%s)", change.number, change.why)

    def _open_folder(self) -> Path:
        """Return the folder of the settings, which no other server uses, or a temporary one."""
        if self._settings.adapt_folder is None:
            return Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
        folder = ensure_writable_folder(self._settings.adapt_folder)
        self._resources.enter_context(lock_of(folder))
        return folder
