"""Admission of requests to the engine, and their ends: complete, cancelled, or drained."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from inference.generation.prompts import Prompt
from inference.serving.answers.reply import Reply
from inference.serving.api_error import ApiError, api_error_of
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.scheduling.engine_thread import LoadedModel
from inference.serving.settings import ServeSettings
from inference.serving.telemetry import Telemetry
from jakiro.errors import EngineStopped, JakiroError, PromptError
from jakiro.utils.logs import get_logger

if TYPE_CHECKING:
    from inference.serving.adaptation import Adaptation

_logger = get_logger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 5  # after which a client may ask again whether the server is ready
_LONGEST_RETRY_SECONDS = 60  # after a request that was refused because others wait


class Admission:
    """Accepts requests before they are prepared, as long as there is room; not thread-safe.

    Args:
        has_several_users: whether no user may have more than half of all sequences of a lane, so
            that there is room for the others.
    """

    def __init__(self, places: int, queue: int, *, has_several_users: bool = False) -> None:
        self._places = places
        self._queue = queue
        self._most = places + queue
        self._most_of_user = -(-self._most // 2) if has_several_users else self._most
        self._replies: list[Reply] = []
        self._mean_seconds = 1.0  # mean duration of a request

    @contextmanager
    def admit(self, reply: Reply) -> Iterator[None]:
        """Keep room for the sequences of a request until they or the block have ended."""
        count = reply.num_live
        if count > self._most_of_user:
            raise ApiError(
                400,
                "the request has too many prompts and choices; "
                f"expected: at most {self._most_of_user}; got: {count}; "
                "remedy: send several requests",
            )
        live = [(r.user, r.num_live) for r in self._replies if r.lane == reply.lane]
        of_user = sum(num for user, num in live if user == reply.user)
        if sum(num for _, num in live) + count > self._most:
            raise self._overload(f"too many requests are waiting; expected: at most {self._queue}")
        if of_user + count > self._most_of_user:
            most = f"at most {self._most_of_user} that run or wait"
            raise self._overload(f"too many sequences of this key; expected: {most}")
        self._replies.append(reply)
        try:
            yield
        finally:
            self._replies.remove(reply)

    def observe(self, seconds: float) -> None:
        """Take the duration of a request into account for the time after which to try again."""
        self._mean_seconds += (seconds - self._mean_seconds) / 8

    def _overload(self, problem: str) -> ApiError:
        waited = self._mean_seconds * (1 + self._queue / self._places)
        return ApiError(
            429,
            f"{problem}; got: more; remedy: try again after the seconds in the header Retry-After",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=max(1, min(math.ceil(waited), _LONGEST_RETRY_SECONDS)),
        )


class Service:
    """The engine, and the limits and counters of requests to it; not thread-safe."""

    def __init__(self, settings: ServeSettings, *, has_several_users: bool = False) -> None:
        self.settings = settings
        self.telemetry = Telemetry()
        self.is_draining = False
        self.num_active = 0  # number of requests that are being answered
        self.num_decoding = 0  # number of those that the drafter of the engine drafts for
        self.adaptation: Adaptation | None = None  # None if the drafter does not learn
        self._model: LoadedModel | None = None
        self._admission = Admission(
            settings.places, settings.queue, has_several_users=has_several_users
        )
        # One thread, because tokenizers and chat templates are not thread-safe.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="jakiro-prepare")

    @property
    def state(self) -> str:
        """The state of the server: loading, ready, draining or dead."""
        if self.is_draining:
            return "draining"
        if self._model is None:
            return "loading"
        return "ready" if self._model.engine.is_alive else "dead"

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise self._not_ready()
        return self._model

    def start(self, model: LoadedModel, adaptation: "Adaptation | None" = None) -> None:
        self._model, self.adaptation = model, adaptation
        self.telemetry.watch_engine(model)

    def check_ready(self) -> None:
        if self.state != "ready":
            raise self._not_ready()

    @asynccontextmanager
    async def open(
        self, prompts: Sequence[Prompt], options: DecodingOptions, user: str
    ) -> AsyncIterator[Reply]:
        """Start the decoding of prompts, and cancel it if the block ends before its time."""
        self.check_ready()
        lane, seconds = self.model.lane_of(options), self.settings.request_seconds
        reply = Reply(prompts, options, lane=lane, user=user, seconds=seconds)
        with self._admission.admit(reply), self.active():
            why = "error"
            try:
                async with self._drafter_in_use():
                    await self.run_preparation(lambda: reply.prepare(self.model))
                    reply.start(self.model)
                    yield reply
                why = "unread"
            except (asyncio.CancelledError, GeneratorExit):
                why = "disconnected"
                raise
            except TimeoutError as error:
                why = "timeout"
                raise self._too_long() from error
            except JakiroError as error:
                raise logged_api_error(error) from error
            finally:
                self._finish(reply, why)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count a request as active in the block: draining waits for it, and learning pauses."""
        self.num_active += 1
        if self.adaptation is not None:
            self.adaptation.pause()
        try:
            yield
        finally:
            self.num_active -= 1

    async def run_preparation(self, function: Callable[[], T]) -> T:
        """Return the result of a function that the thread of the tokenizer runs."""
        return await asyncio.wrap_future(self._preparing.submit(function))

    def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _drafter_in_use(self) -> AsyncIterator[None]:
        """Wait while the weights of the drafter must be replaced, which the block prevents."""
        if self.adaptation is not None:
            async with asyncio.timeout(self.settings.request_seconds):
                await self.adaptation.admit()
            self.check_ready()
        self.num_decoding += 1
        try:
            yield
        finally:
            self.num_decoding -= 1

    def _finish(self, reply: Reply, why: str) -> None:
        """Free what a request used, count it, and let the drafter learn from its texts."""
        reply.stop(self.model)
        if not reply.is_started:
            return
        seconds = self.telemetry.observe(reply, why)
        if seconds is None:
            return
        self._admission.observe(seconds)
        if self.adaptation is not None:
            self.adaptation.record(reply)

    def _not_ready(self) -> ApiError:
        return ApiError(
            503,
            "the server accepts no requests; expected: a server that is ready; "
            f"got: {self.state}; remedy: try another server, or try again later",
            kind="server_error",
            code=self.state,
            retry_after=_RETRY_SECONDS,
        )

    def _too_long(self) -> ApiError:
        return ApiError(
            504,
            "the request takes too long; "
            f"expected: at most {self.settings.request_seconds:g} seconds; got: more; "
            "remedy: request fewer tokens, or start the server with a longer --request-seconds",
            kind="server_error",
            code="request_timeout",
        )


def logged_api_error(error: JakiroError) -> ApiError:
    """Return the error for a client, and log the causes that only the log has."""
    if not isinstance(error, PromptError | EngineStopped):  # the engine logs why it has died
        _logger.error("a request has failed: %s", error, exc_info=error)
    return api_error_of(error)
