"""The decode loop: prefill, then draft, verify, accept and commit until requests are complete."""

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from inference.engine.acceptance import AcceptResult, needs_no_host
from inference.engine.batch import DecodeBatch
from inference.engine.context import Context, most_per_step
from inference.engine.decode_step import DecodeStep
from inference.engine.policy import AlwaysDraft, DraftPolicy
from inference.engine.prefill import Prefill
from inference.engine.request import OutputOptions, Request, SequenceState
from inference.engine.stats import DecodeStats
from inference.protocol import Drafter
from jakiro.errors import JakiroError, PromptError, RequestError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import num_threads

if TYPE_CHECKING:
    from inference.engine.captured import CapturedPool


class DecodeRun(DecodeBatch):
    """Requests that are decoded together; iteration yields first tokens, then decoding steps.

    Further requests may be admitted at any time. Each sequence gets the same tokens as alone, up to
    rounding, unless the drafter or the policy learns from requests.

    Args:
        context: context of an earlier chat turn, for a run with a single request. The context
            remains open at the end of the run. None for a new context.
        pool: caches and recorded steps of earlier runs, for a run with captured steps (see
            `CapturedSteps`); None for ordinary steps.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        requests: Request | Sequence[Request],
        policy: DraftPolicy | None = None,
        context: Context | None = None,
        record: OutputOptions | None = None,
        threads: int | None = None,
        pool: "CapturedPool | None" = None,
    ) -> None:
        group = [requests] if isinstance(requests, Request) else list(requests)
        longest = max(request.max_length for request in group)
        self.sampling = group[0].sampling
        self.draft_policy = policy or AlwaysDraft.with_all_of(drafter)
        # A conversation lends its context, and needs the last tokens.
        self.commits_last = self.is_context_lent = context is not None
        self._pool, captured = pool, None
        if pool and context is None and record is None and needs_no_host(self.sampling):
            capacity = longest + most_per_step(drafter)
            captured = pool.take(target, drafter, self.sampling, len(group), capacity)
            context = captured.context
        super().__init__(
            context or Context(target, drafter, self.sampling, len(group), longest),
            self.draft_policy.new_run(self.sampling, len(group)),
            threads,
            record,
        )
        if pool:
            from inference.engine.captured import CapturedSteps

            self.captured = captured or CapturedSteps(self.context)
            self.captured.attach(self)
        self._is_sound = True  # False within a step; after an error, the caches may contain NaN
        self.context.reserve(longest)
        self.sequences: list[SequenceState] = []
        self.is_closed = False
        first = self._added(group)
        self._waiting: list[SequenceState] = []
        self._prefill: Prefill | None = Prefill(self.context, first)

    @property
    def is_pausing(self) -> bool:
        has_prompts = self._prefill is not None or bool(self._waiting)
        return has_prompts or super().is_pausing

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def stats(self) -> DecodeStats:
        total = DecodeStats.pooled(state.stats for state in self.sequences)
        total.seconds.update(self.seconds)
        return total

    def __iter__(self) -> Generator[list[DecodeStep], None, None]:
        """Yield the first tokens of sequences, and the tokens of each decoding step.

        The first item contains the first tokens of the requests with which the run was created.
        """
        try:
            while not self.is_closed and (self.live or self._prefill or self._waiting):
                started = time.perf_counter()
                self._is_sound = False
                steps = self._next_steps()
                self._is_sound = True
                self.seconds["total"] += time.perf_counter() - started
                if steps:
                    yield steps
        finally:
            self.close()

    def _next_steps(self) -> list[DecodeStep]:
        """Read prompts or decode; return nothing if a prompt has been read only in part."""
        is_under_way = self.captured is not None and self.captured.unread is not None
        steps = [] if is_under_way else self._read_prompts()
        if not steps and self.live:
            with num_threads(self.policy.threads or self.threads):
                steps = self.step()
        return steps

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Add requests to the run, and return their indices; their prompts are read between steps.

        Raises:
            PromptError: the run is closed or belongs to a conversation, or the drafter has trees of
                another shape for these requests (see `Drafter.can_share`).
        """
        if self.is_closed or self.is_context_lent:
            raise PromptError(
                "the run cannot admit requests",
                expected="a run that is not closed, outside a conversation",
                got="a closed run" if self.is_closed else "a run of a conversation",
                remedy="start another run",
            )
        drafter = self.drafter
        others = [
            request.sampling
            for request in requests
            if drafter is not None and not drafter.can_share(self.sampling, request.sampling)
        ]
        if others:
            raise PromptError(
                "the trees of requests that select tokens in different ways differ in shape",
                expected=f"tokens selected as by {self.sampling}, or with trees of the same shape",
                got=str(others[0]),
                remedy="start another run for these requests, or decode without a drafter",
            )
        added = self._added(requests)
        self._waiting += added
        return [state.index for state in added]

    def forget(self, index: int) -> None:
        """Free the tokens of a complete sequence; its counts remain part of `stats`."""
        state = self.sequences[index]
        state.token_ids, state.request = [], replace(state.request, token_ids=[])

    def finish(self) -> "DecodeRun":
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the caches, unless the context was passed in; keep the tokens and statistics."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self.captured is not None:
                self.captured.stop()
        finally:
            self._release()

    def _release(self) -> None:
        if self._prefill is not None and self._prefill.context is not self.context:
            self._prefill.context.close()
        self._prefill, self._waiting, self.live = None, [], []
        for state in self.sequences:
            for ticket in state.request.tickets:
                ticket.end()
        self._release_context()

    def _release_context(self) -> None:
        """Keep the caches for later runs, or free them, unless the context was passed in."""
        if self.captured is not None and self._pool is not None:
            has_recorded = self.captured.num_recorded > 0
            if self._is_sound and has_recorded and not self.is_context_lent:
                self._pool.give(self.captured)
                return
            self.captured.recorded.clear()
        if not self.is_context_lent:
            self.context.close()

    def _added(self, requests: Sequence[Request]) -> list[SequenceState]:
        first = len(self.sequences)
        added = [SequenceState.of(first + index, request) for index, request in enumerate(requests)]
        self.sequences += added
        return added

    @torch.inference_mode()
    def _read_prompts(self) -> list[DecodeStep]:
        """Read a chunk of new prompts; return the first tokens after the last chunk."""
        if self._prefill is None and self._waiting:
            newcomers = self._alike(self._waiting)
            self._waiting = self._waiting[len(newcomers) :]
            context = Context(
                self.target,
                self.drafter,
                newcomers[0].request.sampling,
                len(newcomers),
                max(len(state.token_ids) for state in newcomers),
            )
            self._prefill = Prefill(context, newcomers, follows=len(newcomers) == 1)
        if self._prefill is None:
            return []
        with self.clock("prefill"), num_threads(self.prefill_threads):
            self._prefill.read_chunk()
            if not self._prefill.is_complete:
                return []
            prefill, self._prefill = self._prefill, None
            return self.start(prefill, prefill.sequences)

    def _alike(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """Return the first sequences whose tokens are selected alike; all without a drafter."""
        if self.drafter is None:
            return sequences
        first = sequences[0].request.sampling.description
        descriptions = (state.request.sampling.description for state in sequences)
        alike = takewhile(first.__eq__, descriptions)
        return sequences[: len(list(alike))]

    def _join(self, context: Context, sequences: Sequence[SequenceState]) -> None:
        if sequences:
            self.context.reserve(max(state.request.max_length for state in sequences))
            super()._join(context, sequences)

    def check(self, results: Sequence[AcceptResult]) -> None:
        for result in results:
            if result.error is not None:
                raise _of_caller(result.error)

    def _emit(self, state: SequenceState, result: AcceptResult) -> DecodeStep:
        step = super()._emit(state, result)
        if step.error is not None:  # a stopping criterion has failed
            raise _of_caller(step.error)
        return step

    def _select(self, indices: Sequence[int]) -> None:
        if indices:  # the last sequence stays, because a conversation may continue it
            super()._select(indices)


def _of_caller(error: JakiroError) -> BaseException:
    """Return the exception that the caller's own code raised, if this is the cause."""
    cause = error.__cause__ if isinstance(error, RequestError) else None
    return error if cause is None else cause
