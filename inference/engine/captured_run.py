"""Runs whose decoding steps start before the host has read the previous step."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from inference.engine.acceptance import needs_no_host
from inference.engine.context import Context
from inference.engine.loop import DecodeRun, DecodeStep, longest_of
from inference.engine.pipeline import Pipeline, PipelinePool
from inference.engine.prefill import Prefill
from inference.engine.request import Request
from inference.engine.threads import num_threads
from inference.protocol import Drafter
from jakiro.target.adapter import TargetAdapter


class CapturedRun(DecodeRun):
    """A run whose decoding steps are recorded as CUDA graphs on a GPU, and start without the host.

    Requests are decoded as in `DecodeRun` if the drafter, a processor or a stopping criterion works
    on the host, if the requests select tokens in different ways, or if details are recorded.

    Args:
        target: frozen target.
        drafter: drafter of the trees; None for autoregressive decoding.
        requests: one request or several requests.
        pipelines: pool that the run takes its pipeline from.
        context: context of an earlier chat turn; None for the context of the pipeline.
        **options: other arguments of `DecodeRun`.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        requests: Request | Sequence[Request],
        pipelines: PipelinePool,
        context: Context | None = None,
        **options: Any,
    ) -> None:
        several = [requests] if isinstance(requests, Request) else list(requests)
        # The largest number of tokens that a step can emit.
        self._most_per_step = 1 + (drafter.max_depth if drafter else 0)
        self._pipelines = pipelines
        self._own: Pipeline | None = None  # with the context of this run
        self._pipeline: Pipeline | None = None  # in use
        if context is None:
            capacity = max(request.max_length for request in several) + self._most_per_step
            sampling = several[0].sampling
            self._own = pipelines.take(target, drafter, sampling, len(several), capacity)
        own_context = None if self._own is None else self._own.context
        super().__init__(target, drafter, several, context=context or own_context, **options)
        self.is_context_lent = context is not None

    def close(self) -> None:
        """Give the caches back, unless the context was passed in."""
        if not self.is_closed:
            self._stop_pipeline()
        super().close()

    def _release_context(self) -> None:
        if self._own is not None and self._own.context is self.context:
            self._pipelines.give(self._own)
        else:
            super()._release_context()

    def _next_steps(self) -> list[DecodeStep]:
        if self._pipeline is not None and self._pipeline.has_unread:
            with num_threads(self.threads):
                return self._captured_step()
        return super()._next_steps()

    def _start(self, prefill: Prefill) -> list[DecodeStep]:
        self._stop_pipeline()
        return super()._start(prefill)

    def _step(self) -> list[DecodeStep]:
        return self._captured_step() if self._can_capture else super()._step()

    @property
    def _has_prompts(self) -> bool:
        return self._prefill is not None or bool(self._waiting)

    @property
    def _can_capture(self) -> bool:
        """Whether decoding steps need nothing from the host."""
        if self.record is not None or not needs_no_host(self.sampling):
            return False
        if not self.context.works_on_device:
            return False
        requests = [state.request for state in self.live]
        are_alike = len({request.sampling.description for request in requests}) == 1
        return are_alike and not any(request.stop.others for request in requests)

    @torch.inference_mode()
    def _captured_step(self) -> list[DecodeStep]:
        """Start a decoding step, and emit the tokens of the step before."""
        started = time.perf_counter()
        pipeline = self._pipeline or self._new_pipeline()
        with self._clock("verify"):
            if not pipeline.has_unread:
                self._start_step(pipeline)
            unread = pipeline.take()
            is_ending = self._has_prompts or any(state.is_finished for state in self.live)
            if not is_ending:
                self._start_step(pipeline)
            results = pipeline.read(unread, self.live)
        with self._clock("commit"):
            pairs = zip(self.live, results, strict=True)
            running = [(state, result) for state, result in pairs if not state.is_finished]
            steps = [self._emit(state, result) for state, result in running]
            for state, _ in running:
                state.stats.target_forwards += 1
            finished = [state.is_finished for state in self.live]
            if all(finished) or (any(finished) and not pipeline.has_unread):
                self._stop_pipeline()
                self._retire(finished)
        if not running:
            return steps
        results = [result for _, result in running]
        return self._learned(results, steps, time.perf_counter() - started)

    def _new_pipeline(self) -> Pipeline:
        tokens = [state.token_ids for state in self.live]
        if self.context.session is not None:
            self.context.catch_up(tokens)
        # A step that is discarded in the end may write further tokens.
        self.context.reserve(longest_of(self.live) + self._most_per_step)
        own = self._own
        is_usable = own is not None and own.context is self.context and own.is_valid
        self._pipeline = own if own is not None and is_usable else Pipeline(self.context)
        self._pipeline.resume(self.sampling, tokens)
        return self._pipeline

    def _start_step(self, pipeline: Pipeline) -> None:
        self.num_steps += 1
        for state in self.live:
            state.num_steps += 1
        budget = None if self.drafter is None else self.policy.next_budget()
        pipeline.start(budget, [state.stream_key for state in self.live])

    def _stop_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop([state.token_ids for state in self.live])
            self._pipeline = None
