"""The texts that the engine decodes for one request, as they arrive."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.engine.decode_step import DecodeStep
from inference.engine.request import Request
from inference.engine.stats import DecodeStats
from inference.generation.incremental_text import IncrementalText
from inference.serving.answers.details import ChoiceDetails, DetailLog
from inference.serving.scheduling.job import Job

IDLE_SECONDS = 15.0  # seconds without a token after which an empty list is yielded

FinishReason = Literal["stop", "length"]


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
    text: str
    tokens: list[TokenDetail] = field(default_factory=list)  # if log-probabilities were requested
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
        befores: for each job, the tokens that its texts continue; empty if they continue none.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        wake: Wake,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        seconds: float | None = None,
        befores: Sequence[Sequence[int]] = (),
    ) -> None:
        self.jobs = list(jobs)
        self.started = time.monotonic()
        self.first_token_seconds: float | None = None
        self.fingerprint = ""  # identity of the target, the drafter and the trees
        self._end = math.inf if seconds is None else self.started + seconds
        self._wake = wake
        self._sequences: list[_Choice] = []
        for job, before in zip(self.jobs, befores or [()] * len(self.jobs), strict=True):
            for state in job.sequences:
                text = IncrementalText(tokenizer, stops, before=before)
                choice = _Choice(len(self._sequences), text, state.request)
                record = state.request.record
                if record is not None and record.trees:
                    choice.log = DetailLog(self.started)
                self._sequences.append(choice)

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
    """The text of one sequence, with the tokens whose text is not complete yet."""

    def __init__(self, index: int, text: IncrementalText, request: Request) -> None:
        self.is_ended = False
        self.num_tokens = 0
        self._index = index
        self._text = text
        self._eos_ids = request.stop.eos_ids
        self._max_tokens = request.max_length - len(request.token_ids)
        self._waiting: list[TokenDetail] = []
        self.log: DetailLog | None = None  # log of the details to return

    def extend(self, step: DecodeStep) -> TextDelta:
        """Return the text that a step makes final."""
        has_log_probs = step.details is not None and bool(step.details.raw_log_probs)
        delta, offsets = TextDelta(self._index, ""), []
        for number, token_id in enumerate(step.token_ids):
            self.num_tokens += 1
            delta.text += self._text.push(token_id)
            offsets.append(self._text.offset)
            if has_log_probs:
                self._waiting.append(_detail(step, number, self._text.offset))
            if not self._text.is_holding and not self._text.is_stopped:
                delta.tokens += self._waiting
                self._waiting = []
        if step.finished:
            self._end(delta, step.token_ids[-1])
        if self.log is not None:
            self.log.add(step, offsets)
            is_final = self.is_ended or not self._text.is_holding
            delta.details = self.log.take(delta.text, is_final)
        return delta

    def _end(self, delta: TextDelta, last: int) -> None:
        self.is_ended = True
        delta.text += self._text.flush()
        # Tokens without any character of the text, such as those of a stop string, are left out.
        delta.tokens += [token for token in self._waiting if token.offset < self._text.length]
        is_stop = self._text.is_stopped or last in self._eos_ids
        # The target's own settings may end a text, too.
        is_short = self.num_tokens < self._max_tokens
        delta.finish_reason = "stop" if is_stop or is_short else "length"


def _detail(step: DecodeStep, number: int, offset: int) -> TokenDetail:
    """Return the token with this number in a step."""
    details = step.details
    assert details is not None
    likeliest = details.likeliest[number] if details.likeliest else []
    # Excluded tokens have the log-probability -inf, which JSON does not have.
    likeliest = [pair for pair in likeliest if pair[1] > -math.inf]
    return TokenDetail(step.token_ids[number], offset, details.raw_log_probs[number], likeliest)
