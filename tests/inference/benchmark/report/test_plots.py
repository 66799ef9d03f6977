"""Figures repeat their values as text, and their numbers add up."""

import math
import re

import pytest
from helpers.comparisons import make_document, with_figures

from inference.benchmark.report.plots import (
    WIDTH,
    acceptance,
    expert_load,
    largest,
    sample_limit,
    sample_speeds,
    speedups,
    times,
    token_milliseconds,
)
from inference.benchmark.report.style import fixed, looks, percent, significant

DOCUMENT = make_document()


def alt_of(drawing: str) -> str:
    return re.findall(r'aria-label="([^"]*)"', drawing)[0]


def words_in(drawing: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", drawing)


def test_speed_ups_are_written_with_their_intervals() -> None:
    methods, seen = DOCUMENT.methods, looks(DOCUMENT)
    drawing = speedups(methods, seen, 3.0, name="speed", baseline="autoregressive")
    one = methods[1]
    assert alt_of(drawing).endswith(f"autoregressive 1.00, drafter=mine {fixed(one.speedup)}")
    words = words_in(drawing)
    assert "1.00" in words  # the baseline has no interval
    limits = f"[{fixed(one.speedup_low)}, {fixed(one.speedup_high)}]"
    assert f"{fixed(one.speedup)}  {limits}" in words
    assert "times the speed of autoregressive" in words


def test_milliseconds_per_token_include_prefill() -> None:
    one = DOCUMENT.methods[1]
    total = sum(one.seconds.model_dump().values())
    assert token_milliseconds(one) == pytest.approx(1000 * total / one.tokens)
    drawing = times(DOCUMENT.methods, looks(DOCUMENT), 60.0, name="time")
    assert f"{significant(token_milliseconds(one))} ms" in words_in(drawing)


def test_a_method_that_decoded_nothing_is_shown() -> None:
    document = with_figures(DOCUMENT, 1, tokens=0, samples=())
    one = document.methods[1]
    assert math.isfinite(token_milliseconds(one))
    drawing = sample_speeds([one], looks(document), 1.0, name="samples")
    assert alt_of(drawing).endswith("medians: drafter=mine 0")


def test_the_axis_ends_at_the_fastest_sample() -> None:
    speeds = [
        sample.tokens / sample.seconds for each in DOCUMENT.methods for sample in each.samples
    ]
    assert sample_limit(DOCUMENT.methods) == max(speeds)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([2.0, 3.0, math.inf, math.nan], 3.0), ([0.0, -1.0], 1.0), ([], 1.0)],
)
def test_an_axis_always_has_a_length(values: list[float], expected: float) -> None:
    assert largest(values) == expected


def test_bars_of_experts_show_shares_and_rates() -> None:
    one = DOCUMENT.methods[1]
    words = words_in(expert_load([one], looks(DOCUMENT), name="experts"))
    for counts in (
        [each.proposed for each in one.experts],
        [each.accepted for each in one.experts],
    ):
        assert {percent(count / sum(counts)) for count in counts} <= set(words)
    assert {fixed(each.acceptance) for each in one.experts} <= set(words)


@pytest.mark.parametrize("drafting", [("drafter=a",), ("drafter=a", "drafter=b", "drafter=c")])
def test_the_figure_of_acceptance_grows_with_its_legend(drafting: tuple[str, ...]) -> None:
    document = make_document(("autoregressive", *drafting))
    methods = document.methods[1:]
    drawing = acceptance(methods, looks(document), name="acceptance")
    assert f'width="{WIDTH}" height="{232 + 16 * len(drafting)}"' in drawing
    assert [word for word in words_in(drawing) if word in drafting] == list(drafting)
    first = percent(methods[0].conditional_acceptance_rate[0])
    assert f"at depth 1: drafter=a {first}" in alt_of(drawing)
