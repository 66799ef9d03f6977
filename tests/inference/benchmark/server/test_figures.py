"""Figures of a load agree with records that were made by hand."""

from typing import Any

import pytest
from rich.console import Console

from inference.benchmark.document import Quantiles
from inference.benchmark.server.document import (
    Comparisons,
    Difference,
    LoadDocument,
    LoadFigures,
    LoadSettings,
    MachineFacts,
    RequestRecord,
    ServerFacts,
)
from inference.benchmark.server.figures import (
    MOST_DIFFERENCES,
    AloneAnswers,
    load_figures,
    load_table,
)
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


def _figures(**changes: Any) -> LoadFigures:
    values = {
        "seconds": 2.0,
        "requests": 10,
        "outcomes": {"complete": 10},
        "statuses": {"200": 10},
        "errors": {},
        "tokens": 200,
        "tokens_per_second": 100.0,
        "counted_by_parts": 0,
        "time_to_first_token": Quantiles(p50=0.0123, p95=0.2),
        "between_tokens": None,
        "between_parts": None,
        "request_seconds": None,
        "accepted": 50,
        "rejected": 70,
        "refusals": 0,
        "longest_wait": 0.0,
        **changes,
    }
    return LoadFigures(**values)


def _document(figures: LoadFigures, **changes: Any) -> LoadDocument:
    environment = MachineFacts(
        time="2026-05-01T12:00:00+00:00",
        argv=("jakiro",),
        commit=None,
        is_dirty=None,
        versions={},
        platform="Linux",
        processor="a processor",
        num_cpus=2,
        load_average=None,
    )
    values = {
        "environment": environment,
        "server": ServerFacts(url="http://x/v1", model="m", is_jakiro=True, system_fingerprints=()),
        "settings": LoadSettings(url="http://x", prompts="p.txt"),
        "is_complete": True,
        "figures": figures,
        "alone": None,
        "comparisons": None,
        "requests": (),
        **changes,
    }
    return LoadDocument(**values)


def _shown(document: LoadDocument) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for part in load_table(document):
            console.print(part, highlight=False, markup=False)
    return captured.get()


def test_a_load_without_faults() -> None:
    document = _document(_figures())
    shown = _shown(document)
    assert document.passed
    assert document.speedup is None
    for part in ("m at http://x/v1, 8 at a time", "100.0", "12 / 200 ms", "25% of tokens"):
        assert part in shown
    assert "10 complete; statuses: 10 200" in shown
    for part in ("alone", "429", "failed", "interrupted"):
        assert part not in shown.split("first: ")[0]


def test_a_load_with_all_kinds_of_faults() -> None:
    difference = Difference(prompt="abc", temperature=1.0, position=3, alone="x", loaded="[y]")
    comparisons = Comparisons(
        greedy=5, greedy_equal=5, sampled=5, sampled_equal=4, differences=(difference,)
    )
    figures = _figures(
        outcomes={"complete": 8, "failed": 2},
        errors={"oops [1]": 2},
        refusals=3,
        longest_wait=4.0,
        counted_by_parts=1,
        accepted=None,
    )
    document = _document(
        figures,
        is_complete=False,
        alone=_figures(tokens_per_second=20.0),
        comparisons=comparisons,
    )
    shown = _shown(document)
    assert not document.passed
    assert document.speedup == 5.0
    for part in (
        "interrupted",
        "5.00 times the tokens per second",
        "failed 2 times: oops [1]",
        "status 429: 3 times; longest wait 4.0 s",
        "1 answer had no usage",
        "5 of 5 greedy, 4 of 5 sampled",
        "prompt abc at temperature 1 differs after 3 characters: 'x' alone, '[y]' under load",
    ):
        assert part in shown
