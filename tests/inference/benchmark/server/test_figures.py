"""Figures of a load agree with records that were made by hand."""

from typing import Any

import pytest

from inference.benchmark.server.document import RequestRecord
from inference.benchmark.server.figures import load_figures


def _record(**changes: Any) -> RequestRecord:
    values = {
        "prompt": "p",
        "temperature": 0.0,
        "is_streamed": True,
        "outcome": "complete",
        "status": 200,
        "started": 0.0,
        "to_first": 0.5,
        "seconds": 2.5,
        "gaps": (0.5, 1.5),
        "tokens": 5,
        "prompt_tokens": 3,
        "accepted": 2,
        "rejected": 4,
        "refusals": 0,
        "waited": 0.0,
        **changes,
    }
    return RequestRecord(**values)


RECORDS = [
    _record(),
    _record(to_first=1.5, seconds=3.5, gaps=(2.0,), tokens=2, refusals=2, waited=4.0),
    _record(is_streamed=False, to_first=9.0, seconds=9.0, gaps=(), tokens=3, accepted=None),
    _record(outcome="cut", to_first=2.5, tokens=2, gaps=(7.0,)),
    _record(outcome="failed", status=None, to_first=None, error="broken", tokens=0, gaps=()),
    _record(outcome="failed", status=429, to_first=None, error="busy", refusals=5, tokens=0),
    _record(outcome="refused", status=400, is_streamed=False, to_first=None, tokens=0),
]


def test_figures_of_all_kinds_of_requests() -> None:
    figures = load_figures(RECORDS, 4.0, counted_by_parts=1)
    assert figures.requests == 7
    assert figures.outcomes == {"complete": 3, "cut": 1, "failed": 2, "refused": 1}
    assert figures.statuses == {"200": 4, "400": 1, "429": 8, "none": 1}
    assert figures.errors == {"broken": 1, "busy": 1}
    assert (figures.tokens, figures.tokens_per_second) == (10, 2.5)
    assert figures.time_to_first_token is not None
    assert figures.time_to_first_token.p50 == 1.5  # of 0.5, 1.5, and 2.5
    assert figures.between_tokens is not None
    assert figures.between_tokens.p50 == pytest.approx((0.5 + 2.0) / 2)
    assert figures.between_parts is not None
    assert figures.between_parts.p50 == 1.5
    assert figures.request_seconds is not None
    assert figures.request_seconds.p50 == 3.5
    assert (figures.accepted, figures.rejected) == (4, 12)
    assert (figures.refusals, figures.longest_wait) == (7, 4.0)
    assert figures.counted_by_parts == 1


def test_figures_of_nothing() -> None:
    figures = load_figures([], 0.0, counted_by_parts=0)
    assert (figures.requests, figures.tokens_per_second, figures.outcomes) == (0, 0.0, {})
    assert figures.time_to_first_token is figures.between_tokens is figures.between_parts is None
    assert figures.accepted is None
