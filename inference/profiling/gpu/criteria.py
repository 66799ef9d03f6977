"""Bounds that decoding on a GPU must meet, with the measured values."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Literal, NamedTuple

from inference.profiling.gpu.document import (
    Criterion,
    CriterionState,
    Headline,
    Row,
    SectionResult,
)
from inference.profiling.gpu.scale import Scale
from inference.profiling.gpu.sections import draft, headline, recordings, step, verify
from inference.profiling.gpu.sections.batch import LANES, PARTS

Sections = Mapping[str, SectionResult]
SIBLINGS = 4  # number of siblings for which the time of acceptance is bounded


class Found(NamedTuple):
    """A measured value; if there is none, the reason and the state that follows from it."""

    value: float | None = None
    state: CriterionState = "not measured"
    reason: str | None = None


class Bound(NamedTuple):
    """A bound, and a function that finds the value."""

    name: str
    measure: str
    bound: float
    find: Callable[[Sections, Scale], Found]
    direction: Literal["at most", "at least"] = "at most"


def criteria_of(sections: Sections, scale: Scale, *, is_quick: bool) -> tuple[Criterion, ...]:
    """Return all criteria.

    Args:
        sections: results of the sections so far.
        scale: sizes of the measurements.
        is_quick: whether the run only checks that everything works; no bound is then met or missed.
    """
    return tuple(_criterion(bound, bound.find(sections, scale), is_quick) for bound in BOUNDS)


def headline_of(sections: Sections) -> Headline:
    """Return the main figures of the sections so far."""

    def ratio(temperature: float) -> float | None:
        conditions = {"tau": 3, "temperature": temperature}
        arms = (headline.DRAFTING, headline.CAPTURED_DRAFTING)
        found = (_number(sections, "headline", arm, "ratio", **conditions).value for arm in arms)
        return max((value for value in found if value is not None), default=None)

    def of_step(key: str) -> float | None:
        return _number(sections, "step", step.DRAFTED, key, temperature=0.0).value

    return Headline(
        ratio_greedy=ratio(0.0),
        ratio_sampled=ratio(1.0),
        waits=of_step("waits"),
        launches=of_step("launches"),
        gpu_busy=of_step("gpu_busy"),
    )


def _criterion(bound: Bound, found: Found, is_quick: bool) -> Criterion:
    state, reason = found.state, found.reason
    if found.value is not None:
        is_low = found.value <= bound.bound
        is_met = is_low if bound.direction == "at most" else found.value >= bound.bound
        state = "met" if is_met else "missed"
    if is_quick and state in ("met", "missed"):
        state, reason = "not measured", "a quick run does not measure speed"
    return Criterion(
        name=bound.name,
        measure=bound.measure,
        value=found.value,
        bound=bound.bound,
        direction=bound.direction,
        state=state,
        reason=reason,
    )


def _number(
    sections: Sections, section: str, arm: str, key: str, **conditions: float | int | str
) -> Found:
    """Return a number of the first row with these conditions."""
    if section not in sections:
        return Found(reason=f"the section {section!r} was not run")
    row = sections[section].find(arm, **conditions)
    if row is None:
        return Found(reason=f"the section {section!r} has no such row")
    number = row.number(key)
    return Found(number) if number is not None else _lacking(row, key)


def _lacking(row: Row, key: str) -> Found:
    reason = row.reason or f"there is no value of {key!r}"
    return Found(
        state="not there yet" if row.state == "not there yet" else "not measured", reason=reason
    )


def _over(top: Found, bottom: Found) -> Found:
    """Return the quotient of two values, or the one that is missing."""
    for found in (top, bottom):
        if found.value is None:
            return found
    assert top.value is not None
    assert bottom.value is not None
    return Found(top.value / bottom.value)


def _graph_breaks(sections: Sections, scale: Scale) -> Found:
    rows = sections["recordings"].rows if "recordings" in sections else ()
    compiled = [row for row in rows if row.arm == recordings.COMPILED]
    if not compiled:
        return Found(reason="the section 'recordings' has no such row")
    failed = [row for row in compiled if row.state in ("failed", "invalid")]
    if failed:
        return Found(state="missed", reason=failed[0].reason)
    counts = [row.number("graph_breaks") for row in compiled]
    known = [count for count in counts if count is not None]
    return Found(sum(known)) if known else _lacking(compiled[0], "graph_breaks")


def _draft_vocabulary(sections: Sections, scale: Scale) -> Found:
    sizes = (scale.draft_vocab_size, scale.geometry.vocab_size)
    few, every = (
        _number(sections, "draft", draft.EACH_LEVEL, "ms", draft_vocab_size=size, temperature=0.0)
        for size in sizes
    )
    return _over(few, every)


def _top_p(sections: Sections, scale: Scale) -> Found:
    conditions = {"draft_vocab_size": scale.draft_vocab_size, "temperature": 1.0}
    cut, whole = (
        _number(sections, "draft", draft.ALL, "ms", top_p=top_p, **conditions)
        for top_p in (draft.TOP_P, 1.0)
    )
    return _over(cut, whole)


def _many_queries(sections: Sections, scale: Scale) -> Found:
    conditions = {"context": scale.verify_contexts[1], "queries": scale.queries[-2]}
    return _number(sections, "verify", verify.DEFAULT, "over_one_query", **conditions)


def _captured_verification(sections: Sections, scale: Scale) -> Found:
    conditions = {"context": scale.verify_contexts[0], "queries": scale.queries[-2]}
    captured, eager = (
        _number(sections, "verify", arm, "ms", **conditions)
        for arm in (verify.CAPTURED, verify.DEFAULT)
    )
    return _over(captured, eager)


def _sampled_step(sections: Sections, scale: Scale) -> Found:
    sampled, greedy = (
        _number(sections, "step", step.DRAFTED, "ms", temperature=temperature)
        for temperature in (1.0, 0.0)
    )
    return _over(sampled, greedy)


def _compiled_step(sections: Sections, scale: Scale) -> Found:
    if "recordings" not in sections:
        return Found(reason="the section 'recordings' was not run")
    times: list[float] = []
    for arm in (recordings.COMPILED, recordings.EAGER):
        rows = [
            row
            for row in sections["recordings"].rows
            if row.arm == arm and row.conditions.get("attempt") == "second"
        ]
        own = [ms for row in rows if (ms := row.number("ms")) is not None]
        if not own:
            return _lacking(rows[0], "ms") if rows else Found(reason="there is no such row")
        times.append(median(own))
    return Found(times[0] / times[1])


def _of_step(key: str, temperature: float) -> Callable[[Sections, Scale], Found]:
    return lambda sections, scale: _number(
        sections, "step", step.DRAFTED, key, temperature=temperature
    )


def _acceptance(sections: Sections, scale: Scale) -> Found:
    return _number(sections, "draft", draft.ACCEPT, "ms", siblings=SIBLINGS, top_p=1.0)


def _first_call(sections: Sections, scale: Scale) -> Found:
    conditions = {"backend": verify.DEFAULT}
    return _number(sections, "verify", verify.FIRST_CALL, "first_over_second", **conditions)


def _recorded(sections: Sections, scale: Scale) -> Found:
    return _number(sections, "recordings", recordings.CAPTURED, "recordings")


def _efficiency(sections: Sections, scale: Scale) -> Found:
    return _number(sections, "headline", headline.EFFICIENCY, "share")


def _host_time(sections: Sections, scale: Scale) -> Found:
    found = _number(sections, "batch", PARTS, "host_ms_per_sequence", batch=scale.batches[-1])
    return found if found.value is None else Found(1e3 * found.value)


def _lanes(sections: Sections, scale: Scale) -> Found:
    return _number(sections, "batch", LANES, "ratio", lanes=scale.batches[-1])


def _unmeasured(reason: str) -> Callable[[Sections, Scale], Found]:
    return lambda sections, scale: Found(reason=reason)


BOUNDS = (
    Bound("compiled decoding", "graph breaks", 0, _graph_breaks),
    Bound(
        "tree=auto",
        "seconds over those of autoregressive decoding, upper end of the interval",
        1.05,
        _unmeasured("`jakiro profile automatic --device cuda` measures it"),
    ),
    Bound(
        "draft vocabulary", "milliseconds of a level over those without it", 0.4, _draft_vocabulary
    ),
    Bound(
        "draft vocabulary",
        "tau over tau without it",
        0.97,
        _unmeasured("only trained drafters have a tau"),
        "at least",
    ),
    Bound("waits", "per decoding step, T = 0", 1, _of_step("waits", 0.0)),
    Bound("waits", "per decoding step, T = 1", 1, _of_step("waits", 1.0)),
    Bound("attention", "milliseconds of a tree over those of one token", 1.3, _many_queries),
    Bound("attention", "first call of a new key length over the second", 2, _first_call),
    Bound(
        "captured verification",
        "milliseconds over those without capture",
        0.5,
        _captured_verification,
    ),
    Bound("captured verification", "recordings per class of shapes", 1, _recorded),
    Bound("acceptance", "milliseconds at T = 1 with 4 siblings", 0.15, _acceptance),
    Bound("acceptance", "milliseconds of a step, T = 1 over T = 0", 1.15, _sampled_step),
    Bound("launches", "per decoding step, T = 0", 30, _of_step("launches", 0.0)),
    Bound("GPU", "busy share of the time, T = 0", 0.9, _of_step("gpu_busy", 0.0), "at least"),
    Bound(
        "oracle",
        "share of the speed-up that the forward passes allow",
        0.9,
        _efficiency,
        "at least",
    ),
    Bound("truncated drafts", "milliseconds with top_p = 0.9 over those without", 1.1, _top_p),
    Bound("compiled decoding", "milliseconds over those without it", 0.85, _compiled_step),
    Bound(
        "batches",
        "tokens/s of 64 requests through 32 lanes over two batches",
        1.1,
        _lanes,
        "at least",
    ),
    Bound("batches", "microseconds of the host per sequence and step", 10, _host_time),
)
