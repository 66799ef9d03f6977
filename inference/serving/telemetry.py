"""Counters and times of the server, in Prometheus' text format."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inference.engine.stats import DecodeStats
from inference.serving.engine_thread import LoadedModel
from inference.serving.reply import Reply
from inference.serving.scheduler import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_STEP_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_DEEPEST = 16  # drafts at this depth and below are counted together


class Telemetry:
    """The metrics of one server; no label contains anything that a client sent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "jakiro", "registry": self.registry}
        self._gauge: Callable[..., Gauge] = partial(Gauge, **own)
        count: Callable[..., Counter] = partial(Counter, **own)
        times: Callable[..., Histogram] = partial(Histogram, buckets=_SECONDS, **own)
        self.tokens = count("tokens", "Tokens: prompt, generated, drafted, accepted.", ["kind"])
        self.accepted = count("accepted_by_depth", "Accepted drafts by depth.", ["depth"])
        # The counters of vLLM, which tools for load tests read.
        common = partial(Counter, namespace="vllm:spec_decode", registry=self.registry)
        self.spec_steps = common("num_drafts", "Decoding steps with drafts.")
        self.spec_drafted = common("num_draft_tokens", "Drafted tokens.")
        self.spec_accepted = common("num_accepted_tokens", "Accepted drafts.")
        self.spec_positions = common(
            "num_accepted_tokens_per_pos", "Accepted drafts by depth, from 0.", ["position"]
        )
        self.steps = count("decoding_steps", "Decoding steps of all sequences.")
        self.cancelled = count("cancelled", "Requests that were cancelled.", ["why"])
        self.remote_steps = count("remote_steps", "Trees from other machines.", ["outcome"])
        self.first_token = times("first_token_seconds", "Seconds until the first token.")
        self.duration = times("request_seconds", "Seconds until the last token.")
        self.wait = times("queue_seconds", "Seconds of waiting for a place.")
        self.prefill = times("prefill_seconds", "Seconds of reading a prompt.")
        self.step = times("step_seconds", "Seconds of a step of a lane.", buckets=_STEP_SECONDS)
        self.lessons = count("adapt_lessons", "Lessons of the drafter.", ["outcome"])
        self.changes = count("adapt_changes", "Changes of the drafter's version.", ["why"])

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed whenever the metrics are read."""
        self._gauge(name, text).set_function(value)

    def watch_engine(self, model: LoadedModel) -> None:
        scheduler = model.engine.scheduler
        self.watch("running", "Sequences that have places.", lambda: scheduler.num_running)
        self.watch("waiting", "Prompts that wait for places.", lambda: scheduler.num_waiting)

    def observe(self, reply: Reply, why: str) -> None:
        self.tokens.labels("prompt").inc(reply.num_prompt_tokens)
        self.tokens.labels("generated").inc(reply.num_tokens)
        if reply.first_token_seconds is not None:
            self.first_token.observe(reply.first_token_seconds)
        for job in reply.jobs:
            self._observe_times(job)
        if not reply.is_complete:  # the engine may still be changing the statistics
            self.cancelled.labels(why).inc()
            return
        self.duration.observe(time.monotonic() - reply.started)
        self._count(reply.stats)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def _observe_times(self, job: Job) -> None:
        if job.read >= job.begun:  # neither is NaN
            self.wait.observe(job.begun - job.submitted)
            self.prefill.observe(job.read - job.begun)

    def _count(self, stats: DecodeStats) -> None:
        self.steps.inc(stats.target_forwards)
        self.tokens.labels("drafted").inc(stats.proposed_by_proposer.total())
        self.tokens.labels("accepted").inc(stats.accepted.total())
        self.spec_steps.inc(stats.reached[1])
        self.spec_drafted.inc(stats.proposed_by_proposer.total())
        self.spec_accepted.inc(stats.accepted.total())
        for depth, count in stats.accepted.items():
            deepest = min(depth, _DEEPEST)
            self.accepted.labels(str(deepest)).inc(count)
            self.spec_positions.labels(str(deepest - 1)).inc(count)
