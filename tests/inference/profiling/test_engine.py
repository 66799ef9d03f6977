"""`jakiro profile engine` finishes and prints the documented figures with intervals."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code

from inference.benchmark.stats import interval, median_interval

HEADLINES = {
    "autoregressive_vs_transformers": 1.05,
    "compiled_vs_transformers": 1.3,
    "own_overhead_share": 0.1,
    "context_growth": 0.1,
    "batch8_scaling": None,
    "oracle_efficiency": 0.9,
}


def _document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, float):
        yield value


def test_quick_run_of_the_engine_measures_everything(
    target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("profile", "engine", "--target", str(target_folder), "--quick") == 0
    document = _document(capsys)
    for name, goal in HEADLINES.items():
        figure = document[name]
        assert figure["target"] == goal
        # A quick run compiles nothing.
        is_missing = name == "compiled_vs_transformers"
        assert (figure["value"] is None) == is_missing
        if not is_missing:
            assert figure["low"] <= figure["value"] <= figure["high"]
    assert all(map(math.isfinite, _numbers(document)))
    assert document["environment"]["bytes_per_cached_token"] == 3 * 2 * 2 * 8 * 4
    assert document["details"]["oracle_efficiency"]["tau"] == 4


def test_an_interval_holds_its_value_and_narrows_with_more_items() -> None:
    few = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert few.low <= few.value == 3.0 <= few.high
    many = interval([1.0, 2.0, 3.0, 4.0, 5.0] * 40, lambda values: sum(values) / len(values))
    assert many.high - many.low < few.high - few.low
