"""Admission of requests to the engine, and their ends: complete, cancelled, or drained."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from inference.engine.lane import Lane
from inference.engine.request import OutputOptions
from inference.generation.prompts import Prompt, encode_prompt, needed
from inference.serving.details import DetailWriter
from inference.serving.engine_thread import EngineThread
from inference.serving.job import Job
from inference.serving.reply import Reply, Wake
from inference.serving.schema import ApiError, GenerationBody, api_error_of
from inference.serving.settings import ServeSettings
from inference.serving.telemetry import Telemetry
from jakiro import __version__
from jakiro.errors import JakiroError, PromptError
from jakiro.utils.files import fingerprint

_LONGEST_RETRY_SECONDS = 60


@dataclass(frozen=True)
class DecodingOptions:
    """The options of a request, in the engine's terms."""

    choices: int = 1
    max_new_tokens: int | None = None  # None for as many as there is room for
    temperature: float | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    record: OutputOptions | None = None
    drafts: bool = True  # whether to draft
    others: dict[str, Any] = field(default_factory=dict)  # arguments of `generate()`

    @classmethod
    def of(
        cls, body: GenerationBody, max_new_tokens: int | None, record: OutputOptions | None
    ) -> "DecodingOptions":
        """Return the options of a request body.

        Args:
            body: request body.
            max_new_tokens: largest number of new tokens; None for as many as there is room for.
            record: details of the tokens; None for none.
        """
        own = body.jakiro
        if body.has_details:
            record = replace(record or OutputOptions(), trees=True)
        others = {
            "top_p": body.top_p,
            "top_k": own and own.top_k,
            "min_p": own and own.min_p,
            "repetition_penalty": own and own.repetition_penalty,
        }
        return cls(
            choices=body.n or 1,
            max_new_tokens=max_new_tokens,
            temperature=body.temperature,
            seed=None if body.seed is None else body.seed % 2**63,
            stops=body.stops,
            record=record,
            drafts=own is None or own.drafts is not False,
            others={name: value for name, value in others.items() if value is not None},
        )


class Service:
    """The engine, and the limits and counters of requests to it; not thread-safe.

    Args:
        engine: engine that decodes.
        settings: limits of the server.
    """

    def __init__(self, engine: EngineThread, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.telemetry = Telemetry()
        self.tokenizer = needed(engine.decoder.tokenizer)
        drafter = engine.decoder.drafter
        self.details = DetailWriter(self.tokenizer, drafter.proposer_names if drafter else ())
        self.is_draining = False
        self.num_active = 0  # number of requests that are being answered
        self.created = int(time.time())
        model: Any = engine.decoder.target.model
        path = str(model.config.name_or_path).rstrip("/")
        self.model_name = settings.model_name or path.rpartition("/")[2] or "target"
        self.system_fingerprint = f"fp_{self._fingerprint()[:12]}"
        # One thread, because tokenizers and chat templates are not thread-safe.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="jakiro-prepare")
        self._jobs: list[Job] = []  # those that have not ended yet
        self._mean_seconds = 1.0  # per request
        self._watch()

    @property
    def state(self) -> str:
        """The state of the server: ready, draining or dead."""
        if self.is_draining:
            return "draining"
        return "ready" if self.engine.is_alive else "dead"

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as active.

        Raises:
            ApiError: the server accepts no requests.
        """
        if self.state != "ready":
            raise ApiError(
                503,
                "the server accepts no requests; expected: a server that is ready; "
                f"got: {self.state}; remedy: try another server, or try again later",
                kind="server_error",
                code=self.state,
                retry_after=5,
            )
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    @asynccontextmanager
    async def open(
        self, prompts: Sequence[Prompt], options: DecodingOptions
    ) -> AsyncIterator[Reply]:
        """Start the decoding of prompts, and cancel it if the block ends before its time.

        Args:
            prompts: prompts to continue.
            options: options of all of them.

        Raises:
            ApiError: the prompts or options cannot be used, or too many requests are waiting.
        """
        with self.answering():
            wake = Wake()
            loop = asyncio.get_running_loop()
            try:
                jobs = await loop.run_in_executor(
                    self._preparing, self._prepared, list(prompts), options, wake
                )
                self._start(jobs)
            except JakiroError as error:
                raise api_error_of(error) from error
            reply = Reply(jobs, wake, self.tokenizer, options.stops)
            why = "error"
            try:
                yield reply
                why = "unread"
            except (asyncio.CancelledError, GeneratorExit):
                why = "disconnected"
                raise
            except JakiroError as error:
                raise api_error_of(error) from error
            finally:
                self._finish(reply, why)

    def close(self) -> None:
        """Free the thread that prepares prompts."""
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, prompts: list[Prompt], options: DecodingOptions, wake: Wake) -> list[Job]:
        """Return the jobs of prompts; runs in a thread of its own."""
        jobs: list[Job] = []
        try:
            for prompt in prompts:
                jobs.append(self._job(prompt, options, wake))
        except BaseException:
            _discard(jobs)
            raise
        return jobs

    def _job(self, prompt: Prompt, options: DecodingOptions, wake: Wake) -> Job:
        decoder = self.engine.decoder
        token_ids = encode_prompt(prompt, decoder.tokenizer, decoder.target.spec.vocab_size)
        room = self.engine.capacity - len(token_ids)
        num_new = max(room, 1) if options.max_new_tokens is None else options.max_new_tokens
        if num_new > room:
            raise PromptError(
                "the prompt and its new tokens are longer than a sequence may be",
                expected=f"at most {self.engine.capacity} tokens",
                got=f"{len(token_ids)} prompt tokens and {num_new} new tokens",
                remedy="shorten the prompt or lower max_tokens",
            )
        temperature, others = self._sampling(options)
        return self.engine.prepare(
            token_ids,
            choices=options.choices,
            temperature=temperature,
            seed=options.seed,
            stops=options.stops,
            record=options.record,
            drafts=options.drafts,
            notify=wake.notify,
            max_new_tokens=num_new,
            **others,
        )

    def _sampling(self, options: DecodingOptions) -> tuple[float | None, dict[str, Any]]:
        """Return the temperature, and the other options that have an effect at it."""
        temperature, others = options.temperature, dict(options.others)
        of_sampling = others.keys() & {"top_p", "top_k", "min_p"}
        model: Any = self.engine.decoder.target.model
        if temperature is None and of_sampling and not model.generation_config.do_sample:
            temperature = 1.0  # otherwise these options would be ignored
        if temperature == 0:  # the likeliest token stays the same
            others = {name: value for name, value in others.items() if name not in of_sampling}
        return temperature, others

    def _start(self, jobs: Sequence[Job]) -> None:
        """Submit jobs, unless too many sequences are waiting."""
        try:
            lane = self.engine.scheduler.lane_of(jobs[0])
            count = sum(len(job.sequences) for job in jobs)
            limit = lane.places + self.settings.queue
            if count > limit:
                raise PromptError(
                    "the request has too many prompts and choices",
                    expected=f"at most {limit}",
                    got=count,
                )
            if self._num_sequences(lane) + count > limit:
                raise self._overload()
        except BaseException:
            _discard(jobs)
            raise
        for job in jobs:
            self.engine.start(job)
        self._jobs += jobs

    def _num_sequences(self, lane: Lane) -> int:
        """Return the number of sequences of a lane that run or wait."""
        self._jobs = [job for job in self._jobs if not job.is_ended]
        mine = [job for job in self._jobs if self.engine.scheduler.lane_of(job) is lane]
        return sum(len(job.sequences) for job in mine)

    def _overload(self) -> ApiError:
        waited = self._mean_seconds * (1 + self.settings.queue / self.settings.places)
        return ApiError(
            429,
            "too many requests are waiting; "
            f"expected: at most {self.settings.queue} that wait for a place; "
            "got: one more; remedy: try again after the seconds in the header Retry-After",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=max(1, min(math.ceil(waited), _LONGEST_RETRY_SECONDS)),
        )

    def _finish(self, reply: Reply, why: str) -> None:
        """Free what a request used, and count it."""
        for job in reply.jobs:
            self.engine.cancel(job)
        telemetry = self.telemetry
        telemetry.tokens.labels("prompt").inc(reply.num_prompt_tokens)
        telemetry.tokens.labels("generated").inc(reply.num_tokens)
        if reply.first_token_seconds is not None:
            telemetry.first_token.observe(reply.first_token_seconds)
        if not reply.is_complete:  # the engine may still be changing the statistics
            telemetry.cancelled.labels(why).inc()
            return
        seconds, stats = time.monotonic() - reply.started, reply.stats
        self._mean_seconds += (seconds - self._mean_seconds) / 8
        telemetry.duration.observe(seconds)
        telemetry.steps.inc(stats.target_forwards)
        telemetry.tokens.labels("drafted").inc(stats.proposed_by_proposer.total())
        telemetry.tokens.labels("accepted").inc(stats.accepted.total())

    def _fingerprint(self) -> str:
        decoder, scheduler = self.engine.decoder, self.engine.scheduler
        drafter = None if decoder.drafter is None else decoder.drafter.version
        runs = [self.engine.policy.new_run(lane.sampling, lane.places) for lane in scheduler.lanes]
        trees = [str(getattr(run, "budget", None)) for run in runs]
        return fingerprint(__version__, decoder.target.spec.fingerprint, drafter, trees)

    def _watch(self) -> None:
        scheduler, watch = self.engine.scheduler, self.telemetry.watch
        places = sum(lane.places for lane in scheduler.lanes)
        watch("running", "Sequences that have places.", lambda: scheduler.num_running)
        watch("waiting", "Prompts that wait for places.", lambda: scheduler.num_waiting)
        watch("places_free", "Free places.", lambda: places - scheduler.num_running)
        watch("cache_bytes", "Size of the caches.", lambda: scheduler.num_bytes)


def _discard(jobs: Sequence[Job]) -> None:
    """End jobs that were not started, so that a drafter does not wait for their text."""
    for job in jobs:
        job.end()
