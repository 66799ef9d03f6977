"""Decoding steps that start before the host has read the result of the previous step."""

import time
from collections.abc import Sequence

import torch

from inference.engine.acceptance import never_waits
from inference.engine.batch import DecodeBatch
from inference.engine.context import Context
from inference.engine.decode_step import DecodeStep
from inference.engine.pipeline import Pipeline, recording_key
from inference.engine.request import SequenceState


class CapturedBatch(DecodeBatch):
    """A batch whose decoding steps are recorded as CUDA graphs on a GPU.

    A step starts before the host has read the result of the step before it, so a learning policy
    plans the step without this result. Steps are ordinary ones if the drafter or a processor waits
    for the device, if a processor reads the preceding tokens, if there is a stopping criterion
    other than length, time and end-of-sequence tokens, if the requests differ in more than their
    temperatures, if only some of them ask for drafts, or if details of the tokens are returned.

    A sequence that is complete leaves after the step that was under way. If another sequence joins
    or leaves, the step under way is discarded, and repeated with the same random numbers.
    """

    _pipeline: Pipeline | None = None  # with recorded steps
    _is_running = False  # whether the lengths of the context are those of the pipeline

    def step(self) -> list[DecodeStep]:
        return self._captured_step() if self._can_capture else super().step()

    def _join(self, context: Context, sequences: Sequence[SequenceState]) -> None:
        if sequences:
            self._discard_step()
            super()._join(context, sequences)

    def _select(self, indices: Sequence[int]) -> None:
        self._stop_pipeline()
        super()._select(indices)

    @property
    def _most_per_step(self) -> int:
        """The largest number of tokens that a step can emit for a sequence."""
        return 1 + (self.drafter.max_depth if self.drafter else 0)

    @property
    def _is_pausing(self) -> bool:
        """Whether no step may start before the one under way has been read."""
        return any(state.is_finished for state in self.live)

    @property
    def _can_capture(self) -> bool:
        """Whether decoding steps can run without waiting for the host."""
        requests = [state.request for state in self.live]
        if any(self._record_of(request) is not None for request in requests):
            return False
        if not self.context.works_on_device:
            return False
        if len({request.drafts for request in requests}) > 1:
            return False
        are_alike = len({recording_key(request.sampling) for request in requests}) == 1
        is_on_device = are_alike and never_waits(requests[0].sampling)
        return is_on_device and not any(request.stop.others for request in requests)

    @torch.inference_mode()
    def _captured_step(self) -> list[DecodeStep]:
        """Start a decoding step, and emit the tokens of the step before."""
        started = time.perf_counter()
        with self._clock("verify"):
            pipeline = self._running_pipeline()
            num_recorded = pipeline.num_recorded
            if not pipeline.has_unread:
                self._start_step(pipeline)
            unread = pipeline.take()
            # The limits of the next trees depend on what a policy has learned from earlier steps.
            if not self._is_pausing:
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
        is_typical = pipeline.num_recorded == num_recorded
        seconds = time.perf_counter() - started if is_typical else None
        return self._learned(results, steps, seconds, unread.budget)

    def _running_pipeline(self) -> Pipeline:
        """Return the pipeline, prepared for the live sequences unless it is running already."""
        if self._is_running and self._pipeline is not None:
            return self._pipeline
        tokens = [state.token_ids for state in self.live]
        if self.context.session is not None:
            self.context.catch_up(tokens)
        longest = max(state.request.max_length for state in self.live)
        # A step that is discarded in the end may write further tokens.
        self.context.reserve(longest + self._most_per_step)
        pipeline = self._pipeline
        if pipeline is None or pipeline.context is not self.context or not pipeline.is_valid:
            if pipeline is not None:
                pipeline.forget_steps()
            pipeline = self._pipeline = Pipeline(self.context)
        pipeline.resume([state.request.sampling for state in self.live], tokens)
        self._is_running = True
        return pipeline

    def _start_step(self, pipeline: Pipeline, num_unread: int = 0) -> None:
        self._count_step(1)
        budget = self._next_budget()
        longest = max(len(state.token_ids) for state in self.live) + num_unread
        pipeline.start(budget, [state.stream_key for state in self.live], longest)

    def _stop_pipeline(self) -> None:
        """Prepare the context for ordinary steps, and for sequences that join or leave."""
        if self._pipeline is None or not self._is_running:
            return
        self._is_running = False
        if self._pipeline.has_unread:
            self._count_step(-1)
        self._pipeline.stop([state.token_ids for state in self.live])

    @torch.inference_mode()
    def _discard_step(self) -> None:
        """Discard the step under way, and let complete sequences leave."""
        self._stop_pipeline()
        finished = [state.is_finished for state in self.live]
        if any(finished):
            self._retire(finished)

    def _count_step(self, difference: int) -> None:
        self.num_steps += difference
        for state in self.live:
            state.num_steps += difference
