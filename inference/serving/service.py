"""Admission of requests to the engine, and their ends: complete, cancelled, or drained."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from inference.generation.prompts import Prompt, continued_tokens
from inference.serving.answers.reply import Reply, Wake
from inference.serving.api_error import ApiError, api_error_of
from inference.serving.learning.adaptation import Adaptation
from inference.serving.scheduling.admission import Admission, Admitted
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.scheduling.job import Job
from inference.serving.scheduling.loaded_model import LoadedModel, discard
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
        self.telemetry.watch_engine(model.engine.scheduler, lambda: model.fingerprint)

    def check_ready(self) -> None:
        """Check whether requests are accepted."""
        if self.state != "ready":
            raise self._not_ready()

    @asynccontextmanager
    async def open(
        self, prompts: Sequence[Prompt], options: DecodingOptions, user: str
    ) -> AsyncIterator[Reply]:
        """Start the decoding of prompts, and cancel it if the block ends before its time."""
        async with self._answering(prompts, options, user) as admitted:
            reply = await self._started(prompts, options, admitted)
            why = "error"
            try:
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
                self._learn_from(reply, options, user)

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
    async def _answering(
        self, prompts: Sequence[Prompt], options: DecodingOptions, user: str
    ) -> AsyncIterator[Admitted]:
        """Accept a request before it is prepared, and count it as active."""
        self.check_ready()
        model = self.model
        admitted = self._admission.admit(
            model.lane_of(options), len(prompts) * options.choices, user
        )
        try:
            with self.active():
                await self._until_drafter_may_be_used()
                self.num_decoding += 1
                try:
                    yield admitted
                finally:
                    self.num_decoding -= 1
        finally:
            self._admission.release(admitted)

    async def _until_drafter_may_be_used(self) -> None:
        """Wait while the weights of the drafter must be replaced."""
        if self.adaptation is None:
            return
        try:
            await asyncio.wait_for(self.adaptation.admitted(), self.settings.request_seconds)
        except TimeoutError:
            raise self._too_long() from None
        self.check_ready()

    async def _started(
        self, prompts: Sequence[Prompt], options: DecodingOptions, admitted: Admitted
    ) -> Reply:
        """Return the reply to a request whose jobs were submitted."""
        wake = Wake()
        try:
            jobs = await self._prepared(prompts, options, wake.notify)
            for job in jobs:
                self.model.engine.start(job)
        except JakiroError as error:
            raise logged_api_error(error) from error
        admitted.jobs = jobs
        reply = Reply(
            jobs,
            wake,
            self.model.tokenizer,
            options.stops,
            self.settings.request_seconds,
            [
                continued_tokens(prompt, job.request.token_ids)
                for prompt, job in zip(prompts, jobs, strict=True)
            ],
        )
        reply.fingerprint = self.model.fingerprint  # of the weights that decode the jobs
        return reply

    async def _prepared(
        self, prompts: Sequence[Prompt], options: DecodingOptions, notify: Callable[[], object]
    ) -> list[Job]:
        """Return the jobs of a request, which another thread prepares."""
        future = self._preparing.submit(self.model.jobs_of, prompts, options, notify)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_discard_result)
            raise

    def _finish(self, reply: Reply, why: str) -> None:
        """Free what a request used, and count it."""
        for job in reply.jobs:
            self.model.engine.cancel(job)
        seconds = self.telemetry.observe(reply, why)
        if seconds is not None:
            self._admission.observe(seconds)

    def _learn_from(self, reply: Reply, options: DecodingOptions, user: str) -> None:
        """Let the drafter learn from the texts of a request that is complete."""
        if self.adaptation is not None and reply.is_complete:
            learns, drafts = options.may_learn, options.drafting
            self.adaptation.record(user, reply, may_learn=learns, has_drafts=drafts)

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


def _discard_result(future: "Future[list[Job]]") -> None:
    """End jobs whose client has disconnected while they were prepared."""
    if not future.cancelled() and future.exception() is None:
        discard(future.result())
