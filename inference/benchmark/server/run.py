"""Execution of a load test: clients that send requests, and records of the answers."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

from inference.benchmark.machine import machine_facts
from inference.benchmark.server.devices import (
    DeviceAnswer,
    DeviceClient,
    decided_steps,
    losing_replies,
)
from inference.benchmark.server.document import (
    DecidedSteps,
    LoadDocument,
    LoadFigures,
    LoadSettings,
    Outcome,
    RequestRecord,
    ServerFacts,
)
from inference.benchmark.server.figures import AloneAnswers, load_figures
from inference.benchmark.server.plan import PlannedRequest, Question, planned, questions_of
from inference.client.answer import ServerAnswer
from inference.client.client import ServerClient
from inference.client.patience import ask_patiently
from inference.generation.prompt_file import BenchPrompt, distinct, read_prompts
from jakiro.errors import ResourceError
from jakiro.utils.background import in_background
from jakiro.utils.tracking import Track, untracked

T = TypeVar("T")

_REFUSED = range(400, 500)


async def measure_load(
    settings: LoadSettings, key: str | None = None, track: Track = untracked
) -> LoadDocument:
    """Run a load test of a server, and return the document.

    If the task is cancelled, the document contains only the requests that have ended.

    Args:
        settings: settings of the load test.
        key: API key; None to send none.
        track: function that receives the parts of the measurement, to show progress.

    Raises:
        ConfigError: the server does not have such an interface, key or model.
        PromptError: the prompts cannot be used.
        ResourceError: the server cannot be reached, or does not answer a request alone.
    """
    found = distinct(read_prompts(Path(settings.prompts)))[: settings.num_prompts]
    async with ServerClient(
        settings.url, key, connections=settings.concurrency, seconds=settings.timeout
    ) as client:
        await client.connect(settings.model)
        with losing_replies(client.url, settings.lost_share, settings.seed) as device_url:
            return await _Load(client, settings, found, device_url, key).run(track)


class _Load:
    """A load on one server.

    Args:
        client: client that is connected.
        settings: settings of the load test.
        prompts: prompts without duplicates.
        device_url: address of the server for clients that draft.
        key: API key; None to send none.
    """

    def __init__(
        self,
        client: ServerClient,
        settings: LoadSettings,
        prompts: Sequence[BenchPrompt],
        device_url: str,
        key: str | None,
    ) -> None:
        self._client = client
        self._device_url, self._key = device_url, key
        self._settings = settings
        self._questions = questions_of(settings, prompts)
        self._environment = machine_facts()
        self._fingerprints: set[str] = set()
        self._records: list[RequestRecord] = []
        self._counted_by_parts = 0
        self._alone: AloneAnswers | None = None
        self._started = time.perf_counter()
        self._ended = self._started
        self._source = Random(settings.seed)

    async def run(self, track: Track) -> LoadDocument:
        """Measure, and return the document."""
        settings = self._settings
        await self._ask_alone(self._questions[0])  # the first request may be slow
        alone = await self._measure_alone(track) if settings.check else None
        before = await self._decided()
        is_complete = await self._put_load(track)
        figures, after = self._figures(), await self._decided()
        return LoadDocument(
            environment=self._environment,
            server=ServerFacts(
                url=self._client.url,
                model=self._client.model.name,
                is_jakiro=self._client.model.is_own,
                system_fingerprints=tuple(sorted(self._fingerprints)),
            ),
            settings=settings,
            is_complete=is_complete,
            figures=figures,
            alone=alone,
            comparisons=self._alone and self._alone.comparisons,
            requests=tuple(self._records),
            decided=None if before is None or after is None else _added(before, after, figures),
        )

    async def _decided(self) -> DecidedSteps | None:
        """Return what the server has decided for clients that draft, if there are any."""
        if self._settings.device_drafter is None:
            return None
        return await decided_steps(self._client.url, self._key)

    async def _measure_alone(self, track: Track) -> LoadFigures:
        """Ask all questions one after the other, and keep the answers."""
        advance = track("alone", len(self._questions))
        answers = {}
        self._restart()
        for question in self._questions:
            answer = await self._ask_alone(question)
            answers[question.prompt, question.temperature] = answer
            self._store(PlannedRequest(question), answer, 0.0)
            advance()
        figures = self._figures()
        self._alone = AloneAnswers(answers)
        return figures

    async def _put_load(self, track: Track) -> bool:
        """Run all clients, and return whether they ended by themselves."""
        settings = self._settings
        requests = planned(settings, self._questions, self._client.model.name)
        total = None if settings.seconds else settings.requests or len(self._questions)
        advance = track("under load", total)
        devices: list[DeviceClient | None] = []
        try:
            # One after the other, so that an error is that of one client.
            for _ in range(settings.concurrency):
                devices.append(await self._new_device())
            self._restart()
            async with asyncio.TaskGroup() as group:
                for device in devices:
                    group.create_task(self._ask_all(requests, device, advance))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return False
        finally:
            for device in devices:
                if device is not None:
                    device.close()
        return True

    async def _ask_all(
        self,
        requests: Iterator[PlannedRequest],
        device: DeviceClient | None,
        advance: Callable[[], None],
    ) -> None:
        limit = self._settings.seconds
        for request in requests:
            started = time.perf_counter() - self._started
            if limit is not None and started >= limit:
                return
            answer = await self._send(request, device)
            self._store(request, answer, started)
            advance()

    async def _new_device(self) -> DeviceClient | None:
        """Return a device; None if clients do not draft."""
        drafter = self._settings.device_drafter
        if drafter is None:
            return None
        own = (self._device_url, self._key, drafter, self._settings.timeout)
        return await _in_thread(lambda: DeviceClient(*own))

    async def _send(
        self, planned_request: PlannedRequest, device: DeviceClient | None
    ) -> ServerAnswer:
        if planned_request.bad is not None:
            return await self._client.send(planned_request.bad.path, planned_request.bad.content)
        question = planned_request.question
        assert question is not None
        if device is not None:
            return await _in_thread(lambda: device.ask(question.request))
        request = replace(question.request, is_streamed=planned_request.is_streamed)
        return await ask_patiently(self._client, request, self._source, planned_request.cut_after)

    async def _ask_alone(self, question: Question) -> ServerAnswer:
        """Return the answer to a question while nothing else is asked.

        Raises:
            ResourceError: the answer is not complete.
        """
        answer = await ask_patiently(self._client, question.request, self._source)
        if answer.error is not None:
            raise ResourceError(
                f"the server at {self._client.url} does not answer a request",
                expected="a complete answer with status 200",
                got=f"status {answer.status or 'missing'}: {answer.error}",
                remedy="check the options, and the log of the server",
            )
        return answer

    def _restart(self) -> None:
        self._records, self._counted_by_parts = [], 0
        self._started = self._ended = time.perf_counter()

    def _figures(self) -> LoadFigures:
        seconds = self._ended - self._started
        return load_figures(self._records, seconds, self._counted_by_parts)

    def _store(self, request: PlannedRequest, answer: ServerAnswer, started: float) -> None:
        self._ended = time.perf_counter()
        record = record_of(request, answer, started)
        self._records.append(record)
        if answer.system_fingerprint is not None:
            self._fingerprints.add(answer.system_fingerprint)
        self._counted_by_parts += record.outcome == "complete" and answer.usage is None
        question, is_text = request.question, record.outcome in ("complete", "cut")
        if self._alone is not None and question is not None and is_text:
            self._alone.compare(question, answer)


def _added(before: DecidedSteps, after: DecidedSteps, figures: LoadFigures) -> DecidedSteps | None:
    """Return what was decided meanwhile; None if the server was started again, or lost a text."""
    if figures.device is None or figures.device.resumes or after.decided < before.decided:
        return None
    return DecidedSteps(
        decided=after.decided - before.decided, replayed=after.replayed - before.replayed
    )


async def _in_thread(function: Callable[[], T]) -> T:
    """Return the result of a function that waits for the network."""
    return await asyncio.wrap_future(in_background(function))


def record_of(request: PlannedRequest, answer: ServerAnswer, started: float) -> RequestRecord:
    """Return the record of a request.

    Args:
        request: request that was sent.
        answer: answer to it.
        started: seconds between the beginning of the load and the first sending.
    """
    question, usage, arrivals = request.question, answer.usage, answer.arrivals
    outcome = outcome_of(request, answer)
    return RequestRecord(
        prompt=question and question.prompt,
        temperature=question and question.temperature,
        is_streamed=request.is_streamed and request.bad is None,
        outcome=outcome,
        status=answer.status,
        started=started,
        to_first=arrivals[0] if arrivals else None,
        seconds=answer.seconds,
        gaps=tuple(b - a for a, b in itertools.pairwise(arrivals)),
        tokens=answer.num_tokens,
        prompt_tokens=usage and usage.prompt,
        accepted=usage and usage.accepted,
        rejected=usage and usage.rejected,
        refusals=answer.refusals,
        waited=answer.waited,
        error=_error_of(request, answer) if outcome == "failed" else None,
        device=answer.device if isinstance(answer, DeviceAnswer) else None,
    )


def outcome_of(request: PlannedRequest, answer: ServerAnswer) -> Outcome:
    """Return the outcome of a request.

    Args:
        request: request that was sent.
        answer: answer to it.
    """
    if request.bad is not None:
        return "refused" if answer.status in _REFUSED else "failed"
    if answer.is_cut and answer.error is None:
        return "cut"
    return "complete" if answer.is_complete else "failed"


def _error_of(request: PlannedRequest, answer: ServerAnswer) -> str:
    if request.bad is not None and answer.error is None:
        return f"a request with {request.bad.fault} was not refused"
    return answer.error or "no error"
