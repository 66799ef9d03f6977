"""The texts that the engine decodes for one request, as they arrive."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.engine.decode_step import TARGET, DecodeStep
from inference.engine.request import Request
from inference.engine.stats import DecodeStats
from inference.generation.incremental_text import IncrementalText
from inference.serving.answers.details import ChoiceDetails, DetailLog
from inference.serving.answers.echo import Echo
from inference.serving.scheduling.job import Job

IDLE_SECONDS = 15.0  # seconds without a token after which an empty list is yielded

FinishReason = Literal["stop", "length"]


class TokenDetail(NamedTuple):
    """A token with its origin, and with its log-probability under the target's raw distribution."""

    token_id: int
    offset: int  # number of characters of the text before the token
    log_prob: float | None  # None for the first token of a prompt, or if it was not requested
    likeliest: list[tuple[int, float]]
    # depth of a draft in its tree, or BONUS for a token of the target; None for a prompt
    depth: int | None = None
    proposer: int = TARGET  # expert or drafter that proposed the token


@dataclass
class TextDelta:
    """New text of one choice."""

    index: int  # number of the choice
    text: str
    tokens: list[TokenDetail] = field(default_factory=list)  # if details were requested
    finish_reason: FinishReason | None = None
    details: ChoiceDetails | None = None  # if these were requested


class Wake:
    """Wakes a coroutine from another thread; it belongs to the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake the coroutine; any thread may call this."""
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> bool:
        """Wait for the next notification, and return whether there was one in time."""
        try:
            async with asyncio.timeout(seconds):  # unlike wait_for, never loses a cancellation
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class Reply:
    """The choices of one request.

    Args:
        jobs: job of each prompt. Choice `i` of prompt `p` has the number `p * n + i`.
        wake: object that the jobs notify.
        tokenizer: the target's tokenizer.
        stops: stop strings.
        echoes: for each job, the prompt that its texts repeat first; empty if they do not.
        seconds: seconds that the reply may take; None for no limit.
        drafts: whether the origin of each token is requested.
        befores: for each job, the tokens that its texts continue; empty if they continue none.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        wake: Wake,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        echoes: Sequence[Echo] = (),
        seconds: float | None = None,
        drafts: bool = False,
        befores: Sequence[Sequence[int]] = (),
    ) -> None:
        self.jobs = list(jobs)
        self.started = time.monotonic()
        self.first_token_seconds: float | None = None
        self.fingerprint = ""  # identity of the target, the drafter and the trees
        self._end = math.inf if seconds is None else self.started + seconds
        self._wake = wake
        owners = [(job, state) for job in self.jobs for state in job.sequences]
        befores = befores or [()] * len(self.jobs)
        texts = [
            IncrementalText(tokenizer, stops, before=before)
            for job, before in zip(self.jobs, befores, strict=True)
            for _ in job.sequences
        ]
        self._sequences = [
            _Choice(number, texts[number], state.request, drafts)
            for number, (_, state) in enumerate(owners)
        ]
        for choice, (_, state) in zip(self._sequences, owners, strict=True):
            record = state.request.record
            choice.log = DetailLog(self.started) if record is not None and record.trees else None
        if echoes:
            of_job = {id(job): echo for job, echo in zip(self.jobs, echoes, strict=True)}
            for choice, (job, _) in zip(self._sequences, owners, strict=True):
                choice.begin_with(of_job[id(job)], job)

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.is_ended for choice in self._sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(job.request.token_ids) for job in self.jobs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were decoded and have arrived."""
        return sum(choice.num_tokens for choice in self._sequences)

    @property
    def stats(self) -> DecodeStats:
        """The statistics of all choices together."""
        return DecodeStats.pooled(state.stats for job in self.jobs for state in job.sequences)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Yield new texts until all choices have ended, and an empty list if nothing arrives.

        Raises:
            JakiroError: the engine has stopped, or a choice failed.
            TimeoutError: the reply has taken too long.
        """
        while not self.is_complete:
            rest = self._end - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            if not await self._wake.wait(min(IDLE_SECONDS, rest)):
                yield []
                continue
            while (found := self._arrived()) is not None:
                if found:
                    yield found

    def _arrived(self) -> list[TextDelta] | None:
        """Return the new texts; None if no step arrived, and an empty list if steps add no text."""
        found = []
        first, has_arrived = 0, False
        for job in self.jobs:
            for step in job.poll():
                has_arrived = True
                if step.error is not None:
                    raise step.error
                if self.first_token_seconds is None:
                    self.first_token_seconds = time.monotonic() - self.started
                delta = self._sequences[first + step.index].extend(step)
                if delta.text or delta.tokens or delta.finish_reason or delta.details:
                    found.append(delta)
            first += len(job.sequences)
        return found if has_arrived else None


class _Choice:
    """The text of one sequence, with the tokens whose text is not complete yet.

    Args:
        index: number of the choice.
        text: text of the sequence.
        request: request of the sequence.
        drafts: whether the origin of each token is requested.
    """

    def __init__(self, index: int, text: IncrementalText, request: Request, drafts: bool) -> None:
        self.is_ended = False
        self.num_tokens = 0
        self._index = index
        self._text = text
        self._eos_ids = request.stop.eos_ids
        self._max_tokens = request.max_length - len(request.token_ids)
        self._drafts = drafts
        self._waiting: list[TokenDetail] = []
        self._echo: tuple[Echo, Job] | None = None
        self._num_echoed = 0  # number of characters before the text
        self.log: DetailLog | None = None  # log of the details to return

    def begin_with(self, echo: Echo, job: Job) -> None:
        """Let the text begin with the prompt.

        Args:
            echo: the prompt.
            job: job of the prompt.
        """
        self._echo = echo, job
        self._num_echoed = len(echo.text)

    def extend(self, step: DecodeStep) -> TextDelta:
        """Return the text that a step makes final."""
        has_log_probs = step.details is not None and bool(step.details.raw_log_probs)
        delta = self._first_delta(has_log_probs)
        num_echoed, offsets = len(delta.text), []
        for number, token_id in enumerate(step.token_ids):
            self.num_tokens += 1
            delta.text += self._text.push(token_id)
            offsets.append(self._text.offset)
            if has_log_probs or self._drafts:
                self._waiting.append(_detail(step, number, self._num_echoed + self._text.offset))
            if not self._text.is_holding and not self._text.is_stopped:
                delta.tokens += self._waiting
                self._waiting = []
        if step.finished:
            self._end(delta, step.token_ids[-1])
        if self.log is not None:
            self.log.add(step, offsets)
            is_final = self.is_ended or not self._text.is_holding
            delta.details = self.log.take(delta.text[num_echoed:], is_final)
        return delta

    def _first_delta(self, has_details: bool) -> TextDelta:
        """Return a delta with the prompt, if it was not returned yet, or an empty one."""
        if self._echo is None:
            return TextDelta(self._index, "")
        (echo, job), self._echo = self._echo, None
        tokens = _prompt_details(job, echo) if has_details else []
        return TextDelta(self._index, echo.text, tokens)

    def _end(self, delta: TextDelta, last: int) -> None:
        self.is_ended = True
        delta.text += self._text.flush()
        # Tokens without any character of the text, such as those of a stop string, are left out.
        end = self._num_echoed + self._text.length
        delta.tokens += [token for token in self._waiting if token.offset < end]
        is_stop = self._text.is_stopped or last in self._eos_ids
        # The target's own settings may end a text, too.
        is_short = self.num_tokens < self._max_tokens
        delta.finish_reason = "stop" if is_stop or is_short else "length"


def _prompt_details(job: Job, echo: Echo) -> list[TokenDetail]:
    """Return the tokens of a prompt, which has been read."""
    details, token_ids = job.prompt_details, job.request.token_ids
    assert details is not None
    log_probs = [None, *details.raw_log_probs]
    likeliest = [[], *details.likeliest] if details.likeliest else [[] for _ in token_ids]
    columns = zip(token_ids, echo.offsets, log_probs, likeliest, strict=True)
    return [TokenDetail(*column) for column in columns]


def _detail(step: DecodeStep, number: int, offset: int) -> TokenDetail:
    """Return a token of a step.

    Args:
        step: the step.
        number: number of the token in the step.
        offset: number of characters of the text before the token.
    """
    details = step.details
    log_prob, likeliest = None, []
    if details is not None and details.raw_log_probs:
        log_prob = details.raw_log_probs[number]
        # Excluded tokens have the log-probability -inf, which JSON does not have.
        own = details.likeliest[number] if details.likeliest else []
        likeliest = [pair for pair in own if pair[1] > -math.inf]
    origin = step.depths[number], step.proposer_ids[number]
    return TokenDetail(step.token_ids[number], offset, log_prob, likeliest, *origin)
