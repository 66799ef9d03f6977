"""Runs whose decoding steps start before the host has read the result of the previous step."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from inference.engine.acceptance import needs_no_host
from inference.engine.context import Context
from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun, longest_of
from inference.engine.pipeline import Pipeline, PipelinePool
from inference.engine.policy import AlwaysDraft
from inference.engine.prefill import Prefill
from inference.engine.request import Request
from inference.engine.threads import num_threads
from inference.protocol import Drafter
from jakiro.target.adapter import TargetAdapter


class CapturedRun(DecodeRun):
    """A run whose decoding steps are recorded as CUDA graphs on a GPU.

    If the policy learns nothing, a step starts before the host has read the result of the step
    before it. Requests are decoded as in `DecodeRun` if the drafter waits for the device, if a
    processor reads the preceding tokens, if there is another stopping criterion than length, time
    and end-of-sequence tokens, if the requests select tokens in different ways, if one of them asks
    for no drafts, or if details of the tokens are returned.

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
        self._has_failed = False
        sampling = several[0].sampling
        if context is None and needs_no_host(sampling) and options.get("record") is None:
            capacity = max(request.max_length for request in several) + self._most_per_step
            self._own = pipelines.take(target, drafter, sampling, len(several), capacity)
        own_context = None if self._own is None else self._own.context
        super().__init__(target, drafter, several, context=context or own_context, **options)
        self.is_context_lent = context is not None

    def close(self) -> None:
        """Give the caches back, unless the context was passed in."""
        try:
            if not self.is_closed:
                self._stop_pipeline()
        finally:
            super().close()

    def _release_context(self) -> None:
        own = self._own
        if own is not None and own.context is self.context and not self._has_failed:
            self._pipelines.give(own)
            return
        if own is not None:
            own.forget_steps()
        super()._release_context()

    def _next_steps(self) -> list[DecodeStep]:
        try:
            if self._pipeline is not None and self._pipeline.has_unread:
                with num_threads(self.threads):
                    return self._captured_step()
            return super()._next_steps()
        except BaseException:
            self._has_failed = True  # the caches may contain NaN, which masks do not hide
            raise

    def _start(self, prefill: Prefill) -> list[DecodeStep]:
        self._stop_pipeline()
        return super()._start(prefill)

    def step(self) -> list[DecodeStep]:
        """Perform a decoding step without waiting for the host, if this is possible."""
        return self._captured_step() if self._can_capture else super().step()

    @property
    def _has_prompts(self) -> bool:
        return self._prefill is not None or bool(self._waiting)

    @property
    def _can_capture(self) -> bool:
        """Whether decoding steps can run without waiting for the host."""
        requests = [state.request for state in self.live]
        if any(self._record_of(request) is not None for request in requests):
            return False
        if not self.context.works_on_device:
            return False
        if self.drafter is not None and not all(request.drafts for request in requests):
            return False
        are_alike = len({request.sampling.description for request in requests}) == 1
        is_on_device = are_alike and needs_no_host(requests[0].sampling)
        return is_on_device and not any(request.stop.others for request in requests)

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
            # A policy that learns must learn from this step before it plans the next one.
            if isinstance(self.policy, AlwaysDraft) and not is_ending:
                self._start_step(pipeline, self._most_per_step)
            results = pipeline.read(unread, self.live)
            self._check(results)
        with self._clock("commit"):
            running = [state for state in self.live if not state.is_finished]
            steps = self._emit_all(running, results)
            for state in running:
                state.stats.target_forwards += 1
            finished = [state.is_finished for state in self.live]
            if all(finished) or (any(finished) and not pipeline.has_unread):
                self._stop_pipeline()
                self._retire(finished)
        if not running:
            return steps
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
        self._pipeline.resume(self.live[0].request.sampling, tokens)
        return self._pipeline

    def _start_step(self, pipeline: Pipeline, num_unread: int = 0) -> None:
        """Start a step.

        Args:
            pipeline: pipeline in use.
            num_unread: largest number of tokens that the host has not read yet.
        """
        self.num_steps += 1
        for state in self.live:
            state.num_steps += 1
        budget = None if self.drafter is None else self.policy.next_budget()
        longest = max(len(state.token_ids) for state in self.live) + num_unread
        pipeline.start(budget, [state.stream_key for state in self.live], longest)

    def _stop_pipeline(self) -> None:
        if self._pipeline is not None:
            pipeline, self._pipeline = self._pipeline, None
            if pipeline is not self._own:
                pipeline.forget_steps()
            pipeline.stop([state.token_ids for state in self.live])
