"""The table of a load says what was measured, what failed and what differs."""

from typing import Any

from rich.console import Console

from inference.benchmark.document import Quantiles
from inference.benchmark.server.document import (
    Comparisons,
    Difference,
    LoadDocument,
    LoadFigures,
    LoadSettings,
    MachineFacts,
    ServerFacts,
)
from inference.benchmark.server.table import load_table


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
