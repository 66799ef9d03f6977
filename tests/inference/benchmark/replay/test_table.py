"""The tables of a replay name what was compared, and treat names as plain text."""

from collections.abc import Sequence
from io import StringIO

from helpers.comparisons import make_environment
from rich.console import Console
from rich.table import Table

from inference.benchmark.replay.document import (
    ReplayDocument,
    ReplayedCategory,
    ReplayedPrompt,
    ReplayRow,
    ReplaySettings,
)
from inference.benchmark.replay.table import replay_tables
from inference.benchmark.stats import Ratio


def _row(name: str, temperature: float, tau: float, *categories: str) -> ReplayRow:
    figures = {
        "tau": Ratio(value=tau, low=tau - 0.1, high=tau + 0.1, by_seed=(tau,)),
        "ratio": Ratio(value=tau / 2, low=tau / 2 - 0.05, high=tau / 2 + 0.05, by_seed=(tau / 2,)),
    }
    return ReplayRow(
        drafter=name,
        temperature=temperature,
        trees="candidates=60",
        **figures,
        categories={name: ReplayedCategory(prompts=6, **figures) for name in categories},
        conditional_acceptance_rate=(0.7, 1.0, 0.051),
        counts=((ReplayedPrompt(prompt="a", category="", decoded=6, steps=3),) * 12,),
    )


def test_each_temperature_has_a_table_with_intervals_and_acceptance_by_depth() -> None:
    rows = [_row(name, t, tau) for t in (0.0, 0.8) for name, tau in (("[red]a", 2.0), ("b", 2.5))]
    shown = _shown(rows, tokens={0.0: 1234, 0.8: 999})
    assert "T = 0, candidates=60; 1 training, 12 prompts, 1,234 tokens" in shown
    assert "T = 0.8, candidates=60; 1 training, 12 prompts, 999 tokens" in shown
    assert not any("interrupted" in line or "by category" in line for line in shown)
    assert shown.count("drafter tau tau / [red]a by depth") == 2
    assert shown.count("[red]a 2.00 [1.90, 2.10] 1.000 [0.950, 1.050] .70 1.00 .05") == 2
    assert shown.count("b 2.50 [2.40, 2.60] 1.250 [1.200, 1.300] * .70 1.00 .05") == 2


def test_several_categories_have_a_table_of_their_own() -> None:
    rows = [_row(name, 0.0, tau, "[red]", "chat") for name, tau in (("a", 2.0), ("b", 2.5))]
    shown = _shown(rows, tokens={0.0: 1234})
    assert "T = 0, candidates=60, by category" in shown
    start = shown.index("category prompts drafter tau tau / a")
    assert shown[start + 2 : start + 6] == [
        "[red] 6 a 2.00 [1.90, 2.10] 1.000 [0.950, 1.050]",
        "[red] 6 b 2.50 [2.40, 2.60] 1.250 [1.200, 1.300] *",
        "chat 6 a 2.00 [1.90, 2.10] 1.000 [0.950, 1.050]",
        "chat 6 b 2.50 [2.40, 2.60] 1.250 [1.200, 1.300] *",
    ]


def test_a_narrow_terminal_breaks_names_but_no_figure() -> None:
    names = ("base, trained further", "memory-start-target, trained further")
    rows = [_row(name, 0.0, 2.5, "1,000 to 1,999 tokens", "code") for name in names]
    shown = _shown(rows, tokens={0.0: 1234}, width=80)
    text = " ".join(shown)
    assert "…" not in text
    assert "category prompts drafter" in text
    assert text.count("2.50 [2.40, 2.60]") == 6
    assert text.count("1.250 [1.200, 1.300] *") == 6
    assert "1,999" in text


def _shown(rows: Sequence[ReplayRow], tokens: dict[float, int], width: int = 120) -> list[str]:
    """Return the lines of the tables, with single spaces."""
    document = ReplayDocument(
        environment=make_environment(),
        settings=ReplaySettings(drafters=("a=x",), prompts="p.jsonl", temperatures=tuple(tokens)),
        prompts=12,
        tokens=tokens,
        rows=tuple(rows),
    )
    stream = StringIO()
    for part in replay_tables(document):
        Console(file=stream, width=width).print(part, highlight=False)
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_an_interruption_is_named() -> None:
    document = ReplayDocument(
        environment=make_environment(),
        settings=ReplaySettings(drafters=("a=x",), prompts="p.jsonl", temperatures=(0.0, 0.8)),
        is_complete=False,
        prompts=12,
        tokens={0.0: 1234},
        rows=(_row("a", 0.0, 2.0),),
    )
    note, table, _ = replay_tables(document)
    assert "interrupted" in str(note)
    assert isinstance(table, Table)
    assert "T = 0, candidates=60; 1 training, 12 prompts" in str(table.title)
