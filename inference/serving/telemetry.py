"""Counters and times of the server, in Prometheus' text format."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Telemetry:
    """The metrics of one server; no label contains anything that a client sent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "jakiro", "registry": self.registry}
        self.requests = Counter("requests", "Answered requests.", ["route", "code"], **own)
        self.tokens = Counter(
            "tokens", "Tokens: prompt, generated, drafted, accepted.", ["kind"], **own
        )
        self.steps = Counter("decoding_steps", "Decoding steps of all sequences.", **own)
        self.cancelled = Counter("cancelled", "Requests that were cancelled.", ["why"], **own)
        self.first_token = Histogram(
            "first_token_seconds", "Seconds until the first token.", buckets=_SECONDS, **own
        )
        self.duration = Histogram(
            "request_seconds", "Seconds until the last token.", buckets=_SECONDS, **own
        )
        self._own = own

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed whenever the metrics are read.

        Args:
            name: name of the gauge without the prefix.
            text: description.
            value: function that returns the value.
        """
        Gauge(name, text, **self._own).set_function(value)

    def page(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)
