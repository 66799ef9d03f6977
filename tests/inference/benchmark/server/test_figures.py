"""Figures of a load agree with records that were made by hand."""

from typing import Any

import pytest

from inference.benchmark.server.document import RequestRecord
from inference.benchmark.server.figures import MOST_DIFFERENCES, AloneAnswers, load_figures
from inference.benchmark.server.plan import Question
from inference.client.answer import ServerAnswer
from inference.client.request import ServerRequest

GREEDY = Question("p", 0.0, ServerRequest("p", 8))
SAMPLED = Question("p", 1.0, ServerRequest("p", 8))


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


def _answer(text: str, finish_reason: str | None = "length") -> ServerAnswer:
    return ServerAnswer(200, text, finish_reason=finish_reason, is_cut=finish_reason is None)


def _compared() -> AloneAnswers:
    return AloneAnswers({("p", 0.0): _answer("abcdef"), ("p", 1.0): _answer("xyz")})


def test_equal_answers_and_beginnings_of_cut_ones_are_equal() -> None:
    alone = _compared()
    alone.compare(GREEDY, _answer("abcdef"))
    alone.compare(GREEDY, _answer("abc", None))
    alone.compare(SAMPLED, _answer("xyz"))
    found = alone.comparisons
    assert (found.greedy, found.greedy_equal, found.sampled, found.sampled_equal) == (2, 2, 1, 1)
    assert (found.num_different, found.differences) == (0, ())


def test_differences_are_counted_and_the_first_ones_kept() -> None:
    alone = _compared()
    alone.compare(GREEDY, _answer("abXdef"))
    alone.compare(GREEDY, _answer("abX", None))
    alone.compare(GREEDY, _answer("abcdef", "stop"))
    for _ in range(MOST_DIFFERENCES):
        alone.compare(SAMPLED, _answer("xy"))
    found = alone.comparisons
    assert found.num_different == MOST_DIFFERENCES + 3
    assert found.greedy_equal == found.sampled_equal == 0
    assert len(found.differences) == MOST_DIFFERENCES
    first, _, third, fourth = found.differences[:4]
    assert (first.position, first.alone, first.loaded) == (2, "cdef", "Xdef")
    assert (third.position, third.alone, third.loaded) == (6, "", "")
    assert (fourth.position, fourth.temperature) == (2, 1.0)
