"""Runs whose decoding steps start before the host has read the result of the previous step."""

from collections.abc import Sequence
from typing import Any

from inference.engine.acceptance import never_waits
from inference.engine.captured_batch import CapturedBatch
from inference.engine.context import Context
from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun
from inference.engine.pipeline import Pipeline, PipelinePool
from inference.engine.request import Request
from inference.engine.threads import num_threads
from inference.protocol import Drafter
from jakiro.target.adapter import TargetAdapter


class CapturedRun(CapturedBatch, DecodeRun):
    """A run whose decoding steps are recorded as CUDA graphs on a GPU (see `CapturedBatch`)."""

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
        self._pipelines = pipelines
        pipeline: Pipeline | None = None
        self._has_failed = False
        sampling = several[0].sampling
        if context is None and never_waits(sampling) and options.get("record") is None:
            most_per_step = 1 + (drafter.max_depth if drafter else 0)
            capacity = max(request.max_length for request in several) + most_per_step
            pipeline = pipelines.take(target, drafter, sampling, len(several), capacity)
        own_context = None if pipeline is None else pipeline.context
        super().__init__(target, drafter, several, context=context or own_context, **options)
        self.is_context_lent = context is not None
        self._pipeline = pipeline

    def close(self) -> None:
        """Give the caches back, unless the context was passed in."""
        try:
            if not self.is_closed:
                self._stop_pipeline()
        finally:
            super().close()

    def _release_context(self) -> None:
        pipeline = self._pipeline
        is_reusable = not self.is_context_lent and not self._has_failed
        if is_reusable and pipeline is not None and pipeline.context is self.context:
            self._pipelines.give(pipeline)
            return
        if pipeline is not None:
            pipeline.forget_steps()
        super()._release_context()

    def _next_steps(self) -> list[DecodeStep]:
        try:
            if self._is_running and self._pipeline is not None and self._pipeline.has_unread:
                with num_threads(self.threads):
                    return self._captured_step()
            return super()._next_steps()
        except BaseException:
            self._has_failed = True  # the caches may contain NaN, which masks do not hide
            raise

    @property
    def _is_pausing(self) -> bool:
        has_prompts = self._prefill is not None or bool(self._waiting)
        return has_prompts or super()._is_pausing
