"""Admission of requests to the engine, and their ends: complete, cancelled, or drained."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from inference.generation.prompts import Prompt
from inference.serving.answers.reply import Reply
from inference.serving.api_error import ApiError, api_error_of
from inference.serving.learning.adaptation import Adaptation
from inference.serving.scheduling.admission import Admission
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.scheduling.loaded_model import LoadedModel
from inference.serving.settings import ServeSettings
from inference.serving.telemetry import Telemetry
from jakiro.errors import EngineStopped, JakiroError, PromptError
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 5  # after which a client may ask again whether the server is ready


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
        """Whether the model is loaded."""
        return self._model is not None

    @property
    def model(self) -> LoadedModel:
        """The model."""
        if self._model is None:
            raise self._not_ready()
        return self._model

    def start(self, model: LoadedModel, adaptation: Adaptation | None = None) -> None:
        """Accept requests from now on."""
        self._model, self.adaptation = model, adaptation
        self.telemetry.watch_engine(model)

    def check_ready(self) -> None:
        """Check whether requests are accepted."""
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
        with self._admission.admitted(reply), self.active():
            why = "error"
            try:
                async with self._drafter_in_use():
                    await self.prepared(lambda: reply.prepare(self.model))
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

    async def prepared(self, function: Callable[[], T]) -> T:
        """Return the result of a function that the thread of the tokenizer runs."""
        return await asyncio.wrap_future(self._preparing.submit(function))

    def close(self) -> None:
        """Free the thread that prepares prompts."""
        self._preparing.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _drafter_in_use(self) -> AsyncIterator[None]:
        """Wait while the weights of the drafter must be replaced, which the block prevents."""
        if self.adaptation is not None:
            async with asyncio.timeout(self.settings.request_seconds):
                await self.adaptation.admitted()
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
