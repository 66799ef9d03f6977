"""The results of a study as a table: for the terminal, as Markdown, and as CSV."""

import csv
from collections.abc import Container, Iterator, Sequence
from io import StringIO

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from training.studies.ablation.results import (
    ArmExperts,
    ArmRow,
    ArmSweep,
    StudyResults,
    SweepResults,
)
from training.studies.ablation.sweep import value_name
from training.studies.ablation.uncertainty import Ratio


def markdown_head(names: Sequence[str], left: Container[str]) -> list[str]:
    """Return the two lines above a table's rows; what is not `left` is aligned to the right."""
    return [markdown_line(names), markdown_line(["---" if one in left else "--:" for one in names])]


def markdown_line(cells: Sequence[str]) -> str:
    """Return one row."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def experts_to_markdown(arms: Sequence[ArmExperts]) -> list[str]:
    """Return the lines of a table and what its columns mean."""
    lines = ["Experts on held-out text:", ""]
    lines += markdown_head(("arm", "top-4 overlap", "router entropy", "load entropy"), ("arm",))
    lines += [markdown_line(_cells(one)) for one in arms]
    return [*lines, "", _LEGEND, ""]


_LEGEND = (
    "Top-4 overlap: the share of their four likeliest tokens that two experts have in common. "
    "Router entropy: of the experts' weights at a position; load entropy: of their mean weights; "
    "in nats."
)


def _cells(one: ArmExperts) -> list[str]:
    overlap = "-" if one.top_overlap is None else f"{one.top_overlap:.3f}"
    return [one.arm, overlap, f"{one.router_entropy:.3f}", f"{one.load_entropy:.3f}"]


def sweep_in_words(sweep: SweepResults) -> str:
    """Return which value every arm was trained with."""
    chosen = ", ".join(f"{one.arm} {value_name(one.chosen)}" for one in sweep.arms)
    return f"{sweep.key}, chosen for each arm on {sweep.prompts} dev prompts: {chosen}."


def sweep_to_markdown(sweep: SweepResults) -> list[str]:
    """Return the lines of a table: tau on dev prompts, that of the chosen value in bold."""
    names = ["arm", "T", *(f"{value_name(value)}" for value in sweep.values)]
    lines = [f"Tau on dev prompts with each value of {sweep.key}, seed {sweep.seed}:", ""]
    lines += markdown_head(names, ("arm",))
    for one in sweep.arms:
        for temperature, taus in zip(sweep.temperatures, one.tau, strict=True):
            cells = [one.arm, f"{temperature:g}", *_sweep_cells(sweep, one, taus)]
            lines.append(markdown_line(cells))
    return [*lines, ""]


def _sweep_cells(sweep: SweepResults, one: ArmSweep, taus: tuple[float, ...]) -> list[str]:
    pairs = zip(sweep.values, taus, strict=True)
    return [f"**{tau:.2f}**" if value == one.chosen else f"{tau:.2f}" for value, tau in pairs]


_COLORS = {"base": "dim", "better": "green", "worse": "red", "not resolved": ""}
_RATIOS = ("tau_ratio", "speed_ratio", "speedup")
_PLAIN_FIELDS = (
    *("arm", "temperature", "parameters", "intermediate_size", "held_out_agreement", "tau"),
    *("tokens_per_second", "seconds_per_draft", "verdict"),
)
HEADINGS = ("arm", "size", "width", "T", "tau", "tau / base", "tokens/s / base", "verdict")
_LEFT = ("arm", "trees", "verdict")
# What becomes two lines where a terminal is narrow.
_FOLDING = ("arm", "trees", "tau / base", "tokens/s / base", "verdict")


def to_terminal(results: StudyResults) -> RenderableType:
    """Return the table, what it says of the 2 x 2, and how to read it."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for name in headings_of(results):
        table.add_column(
            name,
            justify="left" if name in _LEFT else "right",
            no_wrap=name not in _FOLDING,
            overflow="fold",
        )
    for rows in results.groups:
        for row in rows:
            # As text, for a name with brackets is no markup.
            table.add_row(*map(Text, _result_cells(row)), style=_COLORS[row.verdict])
        table.add_section()
    return Group(table, *map(Text, _remarks(results)))


def to_markdown(results: StudyResults) -> str:
    """Return the table and remarks as Markdown, then tables of experts and of the sweep."""
    lines = markdown_head(headings_of(results), _LEFT)
    lines += [markdown_line(_result_cells(row)) for rows in results.groups for row in rows]
    lines += ["", "\n\n".join(_remarks(results)), ""]
    if results.experts:
        lines += experts_to_markdown(results.experts)
    if results.sweep is not None:
        lines += sweep_to_markdown(results.sweep)
    return "\n".join(lines)


def headings_of(results: StudyResults) -> tuple[str, ...]:
    """Return the names of the columns; kinds of trees have one where there are several."""
    before = HEADINGS.index("tau")
    return (
        HEADINGS if results.trees == [None] else (*HEADINGS[:before], "trees", *HEADINGS[before:])
    )


def to_csv(results: StudyResults) -> str:
    """Return one line for each arm and temperature, with all digits."""
    target = StringIO()
    records = [_record(row) for row in results.rows]
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(target, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return target.getvalue()


def with_interval(ratio: Ratio) -> str:
    """Return a ratio with its interval in brackets."""
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _result_cells(row: ArmRow) -> list[str]:
    is_base = row.verdict == "base"
    return [
        row.arm,
        _short(row.parameters),
        f"{row.intermediate_size}",
        f"{row.temperature:g}",
        *([] if row.trees is None else [row.trees]),
        f"{row.tau:.2f}",
        "1" if is_base else with_interval(row.tau_ratio),
        "1" if is_base else with_interval(row.speed_ratio),
        "" if is_base else row.verdict,
    ]


def _short(count: int) -> str:
    """Return a count with three digits, for all arms are equally large."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count}"


def _remarks(results: StudyResults) -> Iterator[str]:
    yield results.note
    for one in results.interactions:
        yield one.sentence
    if results.sweep is not None:
        yield sweep_in_words(results.sweep)


def _record(row: ArmRow) -> dict[str, object]:
    record: dict[str, object] = {name: getattr(row, name) for name in _PLAIN_FIELDS}
    if row.trees is not None:
        record["trees"] = row.trees
    for name in _RATIOS:
        one: Ratio = getattr(row, name)
        record |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
    record |= _numbered("tau_ratio_seed", row.tau_ratio.by_seed)
    record |= _numbered("training_tokens_seed", row.training_tokens)
    return record | _numbered("acceptance_depth", row.acceptance_by_depth, first=1)


def _numbered(name: str, values: Sequence[object], first: int = 0) -> dict[str, object]:
    return {f"{name}_{place}": value for place, value in enumerate(values, start=first)}
