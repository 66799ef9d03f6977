"""The way of a request through the server, and its end: complete, cancelled, or drained."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from inference.generation.prompts import Prompt
from inference.serving.api_error import ApiError, api_error_of
from inference.serving.decoding_options import DecodingOptions
from inference.serving.engine_thread import LoadedModel
from inference.serving.reply import Reply
from inference.serving.settings import ServeSettings
from inference.serving.telemetry import Telemetry
from jakiro.errors import JakiroError

if TYPE_CHECKING:
    from inference.serving.adaptation import Adaptation

T = TypeVar("T")

_RETRY_SECONDS = 5  # after which a client may ask again


class Service:
    """The engine, and the limits and counters of requests to it; not thread-safe."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.telemetry = Telemetry()
        self.is_draining = False
        self.num_active = 0  # number of requests that are being answered
        self.adaptation: Adaptation | None = None  # None if the drafter does not learn
        self._num_sequences = 0  # number of sequences of the requests that are being answered
        self._model: LoadedModel | None = None
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
        reply = Reply(prompts, options, user=user, seconds=self.settings.request_seconds)
        with self._room(len(prompts) * options.choices), self.active():
            why = "error"
            try:
                adaptation, seconds = self.adaptation, self.settings.request_seconds
                async with nullcontext() if adaptation is None else adaptation.admitted(seconds):
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
                raise api_error_of(error) from error
            finally:
                self._finish(reply, why)

    @contextmanager
    def _room(self, count: int) -> Iterator[None]:
        """Refuse a request before its prompts are encoded, unless there is room for it."""
        most = self.settings.places + self.settings.queue
        if count > most:
            raise ApiError(400, f"too many sequences; expected: at most {most}; got: {count}")
        if self._num_sequences + count > most:
            raise ApiError(
                429,
                f"too many sequences: at most {most} are decoded or wait; try again later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=_RETRY_SECONDS,
            )
        self._num_sequences += count
        try:
            yield
        finally:
            self._num_sequences -= count

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

    def _finish(self, reply: Reply, why: str) -> None:
        """Free what a request used, count it, and let the drafter learn from its texts."""
        reply.stop(self.model)
        if not reply.is_started:
            return
        self.telemetry.observe(reply, why)
        if reply.is_complete and self.adaptation is not None:
            self.adaptation.record(reply)

    def _not_ready(self) -> ApiError:
        return ApiError(
            503,
            f"the server accepts no requests: it is {self.state}; try again later",
            kind="server_error",
            code=self.state,
            retry_after=_RETRY_SECONDS,
        )

    def _too_long(self) -> ApiError:
        return ApiError(
            504,
            f"the request takes longer than {self.settings.request_seconds:g} seconds",
            kind="server_error",
            code="request_timeout",
        )
