"""A request on its way through the server, and the texts that the engine decodes for it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from inference.engine.decode_step import DecodeStep
from inference.engine.request import Request
from inference.engine.stats import DecodeStats
from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import Prompt, continued_tokens
from inference.serving.decoding_options import DecodingOptions
from inference.serving.details import DetailWriter
from inference.serving.engine_thread import LoadedModel
from inference.serving.scheduler import Event, Job


class TokenDetail(NamedTuple):
    """A token with its log-probability under the target's raw distribution."""

    token_id: int
    offset: int  # number of characters of the text before the token
    log_prob: float
    likeliest: list[tuple[int, float]]


@dataclass
class TextDelta:
    """New text of one choice."""

    index: int  # number of the choice
    text: str = ""
    tokens: list[TokenDetail] = field(default_factory=list)  # if log-probabilities were requested
    finish_reason: Literal["stop", "length"] | None = None
    details: dict[str, Any] | None = None  # value of the field `jakiro`, if it was requested


class Reply:
    """A request and its choices; choice `i` of prompt `p` has the number `p * n + i`.

    Args:
        seconds: largest number of seconds until the last token.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        options: DecodingOptions,
        *,
        user: str = "",
        seconds: float = math.inf,
    ) -> None:
        self.prompts, self.options = prompts, options
        self.user = user
        self.jobs: list[Job] = []  # one job for each prompt
        self.started = time.monotonic()
        self.first_token_seconds: float | None = None
        self.fingerprint = ""  # identity of the target, the drafter and the trees
        self._end = self.started + seconds
        self._is_over = False
        self._choices: list[_Choice] = []  # empty until the jobs have been started
        self._loop = asyncio.get_running_loop()
        # Events with the number of the first choice of their job.
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def prepare(self, model: LoadedModel) -> None:
        """Add the jobs; for any thread."""
        for number, prompt in enumerate(self.prompts):
            first = number * self.options.choices
            put = partial(self._put, first)
            self.jobs.append(model.engine.prepare(prompt, self.options, first_row=first, put=put))
            if self._is_over:  # the client has disconnected
                return self.jobs[-1].end()
        return None

    def start(self, model: LoadedModel) -> None:
        self.fingerprint = model.fingerprint  # of the weights that decode the jobs
        for prompt, job in zip(self.prompts, self.jobs, strict=True):
            before = continued_tokens(prompt, job.request.token_ids)
            for state in job.sequences:
                index = len(self._choices)
                text = IncrementalText(model.tokenizer, self.options.stops, before=before)
                self._choices.append(
                    _Choice(index, text, state.request, model.details, self.started)
                )
        for job in self.jobs:
            model.engine.start(job)

    def stop(self, model: LoadedModel) -> None:
        """End all jobs, also those that are being prepared."""
        self._is_over = True
        for job in self.jobs:
            model.engine.cancel(job)

    @property
    def is_started(self) -> bool:
        return bool(self._choices)

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended, and all of their text has been taken."""
        return self.is_started and all(choice.is_ended for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.request.token_ids) for job in self.jobs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were decoded and have arrived."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def stats(self) -> DecodeStats:
        return DecodeStats.pooled(state.stats for job in self.jobs for state in job.sequences)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Yield new texts until all choices have ended.

        Raises:
            TimeoutError: the reply has taken too long.
        """
        while not self.is_complete:
            async with asyncio.timeout(self._end - time.monotonic()):
                first, event = await self._events.get()
            if isinstance(event, DecodeStep):
                error = event.error
                if error is None and (delta := self._extend(first, event)):
                    yield delta
            else:
                error = event
            if error is not None:
                raise error

    def _extend(self, first: int, step: DecodeStep) -> TextDelta | None:
        """Return the text that a step makes final; None if there is nothing to send."""
        if self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self.started
        delta = self._choices[first + step.index].extend(step)
        is_empty = not (delta.text or delta.tokens or delta.finish_reason or delta.details)
        return None if is_empty else delta

    def _put(self, first: int, event: Event) -> None:
        """Pass an event on to the event loop; for the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (first, event))


class _Choice:
    """The text of one sequence, with the tokens whose text is not complete yet."""

    def __init__(
        self,
        index: int,
        text: IncrementalText,
        request: Request,
        details: DetailWriter,
        started: float,
    ) -> None:
        self.is_ended = False
        self.num_tokens = 0
        self._index = index
        self._text = text
        self._eos_ids = request.stop.eos_ids
        self._max_tokens = request.max_length - len(request.token_ids)
        self._waiting: list[TokenDetail] = []
        self._details, self._started = details, started
        self._has_details = request.record is not None and request.record.trees
        self._num_steps = 0

    def extend(self, step: DecodeStep) -> TextDelta:
        has_log_probs = step.details is not None and bool(step.details.raw_log_probs)
        delta, texts = TextDelta(self._index), list[str]()
        for number, token_id in enumerate(step.token_ids):
            self.num_tokens += 1
            texts.append(self._text.push(token_id))
            if has_log_probs:
                self._waiting.append(_detail(step, number, self._text.offset))
            if not self._text.is_holding and not self._text.is_stopped:
                delta.tokens += self._waiting
                self._waiting = []
        if step.finished:
            texts[-1] += self._text.flush()
            self._end(delta, step.token_ids[-1])
        delta.text = "".join(texts)
        if self._has_details:
            seconds = step.emitted_at - self._started
            details = self._details.step(step, self._num_steps, texts, seconds)
            delta.details = {"index": self._index, **details}
        self._num_steps += 1
        return delta

    def _end(self, delta: TextDelta, last: int) -> None:
        self.is_ended = True
        # Tokens without any character of the text, such as those of a stop string, are left out.
        delta.tokens += [token for token in self._waiting if token.offset < self._text.length]
        is_stop = self._text.is_stopped or last in self._eos_ids
        # The target's own settings may end a text, too.
        is_short = self.num_tokens < self._max_tokens
        delta.finish_reason = "stop" if is_stop or is_short else "length"


def _detail(step: DecodeStep, number: int, offset: int) -> TokenDetail:
    details = step.details
    assert details is not None
    likeliest = details.likeliest[number] if details.likeliest else []
    # Excluded tokens have the log-probability -inf, which JSON does not have.
    likeliest = [pair for pair in likeliest if pair[1] > -math.inf]
    return TokenDetail(step.token_ids[number], offset, details.raw_log_probs[number], likeliest)
