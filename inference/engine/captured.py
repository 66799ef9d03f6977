"""Decoding steps that start before the host has read the result of the previous step."""

import time
from typing import TYPE_CHECKING
from weakref import proxy

import torch

from inference.engine.acceptance import never_waits
from inference.engine.context import most_per_step
from inference.engine.decode_step import DecodeStep
from inference.engine.pipeline import Pipeline, recording_key

if TYPE_CHECKING:
    from inference.engine.batch import DecodeBatch


class CapturedSteps:
    """The steps of a batch that are recorded as CUDA graphs on a GPU.

    A step starts before the host has read the result of the step before it, so a learning policy
    plans the step without this result. Steps are ordinary ones if the drafter or a processor waits
    for the device, if a processor reads the preceding tokens, if there is a stopping criterion
    other than length, time and end-of-sequence tokens, if the requests differ in more than their
    temperatures, if only some of them ask for drafts, or if details of the tokens are returned.

    A sequence that is complete leaves after the step that was under way. If another sequence joins
    or leaves, the step under way is discarded, and repeated with the same random numbers.
    """

    def __init__(self, batch: "DecodeBatch", pipeline: Pipeline | None = None) -> None:
        self.batch: DecodeBatch = proxy(batch)  # an abandoned batch is freed at once
        self.pipeline = pipeline  # with recorded steps
        self.is_running = False  # whether the lengths of the context are those of the pipeline

    @property
    def has_unread(self) -> bool:
        """Whether a step is under way."""
        return self.pipeline is not None and self.pipeline.unread is not None

    @property
    def can_step(self) -> bool:
        """Whether decoding steps can run without waiting for the host."""
        batch = self.batch
        requests = [state.request for state in batch.live]
        if any(batch.record_of(request) is not None for request in requests):
            return False
        if not batch.context.works_on_device:
            return False
        if len({request.drafts for request in requests}) > 1:
            return False
        are_alike = len({recording_key(request.sampling) for request in requests}) == 1
        is_on_device = are_alike and never_waits(requests[0].sampling)
        return is_on_device and not any(request.stop.others for request in requests)

    @torch.inference_mode()
    def step(self) -> list[DecodeStep]:
        """Start a decoding step, and emit the tokens of the step before."""
        started = time.perf_counter()
        batch = self.batch
        with batch.clock("verify"):
            pipeline = self._running_pipeline()
            num_recorded = pipeline.num_recorded
            if pipeline.unread is None:
                self._start(pipeline)
            unread, pipeline.unread = pipeline.unread, None
            assert unread is not None
            # The limits of the next trees depend on what a policy has learned from earlier steps.
            if not batch.is_pausing:
                self._start(pipeline, most_per_step(batch.drafter))
            results = pipeline.read(unread, batch.live)
            batch.check(results)
        with batch.clock("commit"):
            running = [state for state in batch.live if not state.is_finished]
            steps = batch.emit_all(running, results)
            for state in running:
                state.stats.target_forwards += 1
            finished = [state.is_finished for state in batch.live]
            if all(finished) or (any(finished) and pipeline.unread is None):
                self.discard_step()
        if not running:
            return steps
        is_typical = pipeline.num_recorded == num_recorded
        seconds = time.perf_counter() - started if is_typical else None
        return batch.learned(results, steps, seconds, unread.budget)

    def stop(self) -> None:
        """Prepare the context for ordinary steps, and for sequences that join or leave."""
        if self.pipeline is None or not self.is_running:
            return
        self.is_running = False
        if self.has_unread:
            self._count_step(-1)
        self.pipeline.stop([state.token_ids for state in self.batch.live])

    @torch.inference_mode()
    def discard_step(self) -> None:
        """Discard the step under way, and let complete sequences leave."""
        self.stop()
        finished = [state.is_finished for state in self.batch.live]
        if any(finished):
            self.batch.retire(finished)

    def forget(self) -> None:
        """Free what was recorded."""
        if self.pipeline is not None:
            self.pipeline.forget_steps()

    def _running_pipeline(self) -> Pipeline:
        """Return the pipeline, prepared for the live sequences unless it is running already."""
        if self.is_running and self.pipeline is not None:
            return self.pipeline
        context, live = self.batch.context, self.batch.live
        tokens = [state.token_ids for state in live]
        if context.session is not None:
            context.catch_up(tokens)
        longest = max(state.request.max_length for state in live)
        # A step that is discarded in the end may write further tokens.
        context.reserve(longest + most_per_step(context.drafter))
        pipeline = self.pipeline
        if pipeline is None or pipeline.context is not context or not pipeline.is_valid:
            self.forget()
            pipeline = self.pipeline = Pipeline(context)
        pipeline.resume([state.request.sampling for state in live], tokens)
        self.is_running = True
        return pipeline

    def _start(self, pipeline: Pipeline, num_unread: int = 0) -> None:
        self._count_step(1)
        batch = self.batch
        budget = batch.next_budget()
        longest = max(len(state.token_ids) for state in batch.live) + num_unread
        pipeline.start(budget, [state.stream_key for state in batch.live], longest)

    def _count_step(self, difference: int) -> None:
        self.batch.num_steps += difference
        for state in self.batch.live:
            state.num_steps += difference
