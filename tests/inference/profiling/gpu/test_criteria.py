"""Criteria compare measured values with bounds, and say why there is no value."""

from inference.profiling.gpu.criteria import BOUNDS, criteria_of, headline_of
from inference.profiling.gpu.document import Criterion, Row, SectionResult
from inference.profiling.gpu.scale import FULL


def _section(*rows: Row) -> SectionResult:
    return SectionResult(minutes=1, rows=rows)


def _step(temperature: float, **values: float) -> Row:
    return Row(arm="drafted", conditions={"temperature": temperature}, values=values)


SECTIONS = {
    "step": _section(
        _step(0.0, ms=10, waits=9, launches=20, gpu_busy=0.95), _step(1.0, ms=11, waits=1)
    ),
    "verify": _section(
        Row(
            arm="default",
            conditions={"context": 8192, "queries": 61},
            values={"ms": 6.0, "over_one_query": 1.2},
        ),
        Row(
            arm="captured",
            conditions={"context": 2048, "queries": 61},
            state="not there yet",
            reason="not written",
        ),
    ),
    "recordings": _section(
        Row(arm="compiled", state="failed", reason="AssertionError: forbidden"),
    ),
    "headline": _section(
        Row(
            arm="oracle with the cost of drafting",
            conditions={"tau": 3, "temperature": 0.0},
            values={"ms": 2.0, "ratio": 2.2},
        ),
        Row(
            arm="oracle with the cost of drafting",
            conditions={"tau": 3, "temperature": 1.0},
            state="invalid",
            values={"ms": 2.0, "ratio": 9.9},
        ),
    ),
}


def _criteria(*, is_quick: bool = False) -> dict[tuple[str, str], Criterion]:
    found = criteria_of(SECTIONS, FULL, is_quick=is_quick)
    return {(each.name, each.measure): each for each in found}


def test_values_are_compared_with_their_bounds_on_the_right_side() -> None:
    criteria = _criteria()
    waits = criteria["waits", "per decoding step, T = 0"]
    assert (waits.value, waits.state) == (9, "missed")
    assert criteria["waits", "per decoding step, T = 1"].state == "met"
    assert criteria["launches", "per decoding step, T = 0"].state == "met"
    assert criteria["GPU", "busy share of the time, T = 0"].state == "met"
    sampled = criteria["acceptance", "milliseconds of a step, T = 1 over T = 0"]
    assert (sampled.value, sampled.state) == (1.1, "met")
    tree = criteria["attention", "milliseconds of a tree over those of one token"]
    assert (tree.value, tree.state) == (1.2, "met")


def test_criteria_without_a_value_have_a_reason() -> None:
    criteria = _criteria()
    assert len(criteria) == len(BOUNDS)
    captured = criteria["captured verification", "milliseconds over those without capture"]
    assert (captured.state, captured.reason) == ("not there yet", "not written")
    breaks = criteria["compiled decoding", "graph breaks"]
    assert (breaks.state, breaks.reason) == ("missed", "AssertionError: forbidden")
    batches = criteria["batches", "microseconds of the host per sequence and step"]
    assert (batches.state, batches.reason) == ("not measured", "the section 'batch' was not run")
    assert all(each.reason for each in criteria.values() if each.value is None)


def test_a_quick_run_meets_and_misses_nothing() -> None:
    states = {each.state for each in _criteria(is_quick=True).values()}
    assert states == {"not measured", "not there yet"}


def test_the_headline_contains_valid_figures_only() -> None:
    headline = headline_of(SECTIONS)
    assert headline.ratio_greedy == 2.2
    assert headline.ratio_sampled is None
    assert (headline.waits, headline.launches, headline.gpu_busy) == (9, 20, 0.95)
    assert headline_of({}).ratio_greedy is None
