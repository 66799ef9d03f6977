"""Tables of a study's results, for the terminal, in Markdown and in CSV."""

import csv
from collections.abc import Container, Iterator, Sequence
from io import StringIO

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inference.benchmark.stats import Ratio
from jakiro.utils.wording import rounded
from training.studies.ablation.results import (
    ArmExperts,
    ArmRow,
    ArmSweep,
    StudyResults,
    SweepResults,
)
from training.studies.ablation.sweep import value_name


def markdown_head(names: Sequence[str], left: Container[str]) -> list[str]:
    """Return the two lines above the rows of a Markdown table.

    Args:
        names: names of the columns.
        left: names of the columns that are aligned left; the other columns are aligned right.
    """
    alignment = ["---" if name in left else "--:" for name in names]
    return [markdown_line(names), markdown_line(alignment)]


def markdown_line(cells: Sequence[str]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def experts_to_markdown(arms: Sequence[ArmExperts]) -> list[str]:
    """Return the lines of a table on the diversity of the experts, with a legend."""
    lines = ["Experts on validation data:", ""]
    lines += markdown_head(("arm", "top-4 overlap", "router entropy", "load entropy"), ("arm",))
    lines += [markdown_line(_cells(arm)) for arm in arms]
    return [*lines, "", _LEGEND, ""]


_LEGEND = (
    "Top-4 overlap: fraction of the four most likely tokens that two experts have in common. "
    "Router entropy: mean entropy of the experts' weights at a position. Load entropy: entropy of "
    "the experts' mean weights. Entropies are in nats."
)


def _cells(found: ArmExperts) -> list[str]:
    overlap = "-" if found.top_overlap is None else f"{found.top_overlap:.3f}"
    return [found.arm, overlap, f"{found.router_entropy:.3f}", f"{found.load_entropy:.3f}"]


def sweep_in_words(sweep: SweepResults) -> str:
    """Return a sentence with the selected value of every arm."""
    values = ", ".join(f"{swept.arm} {value_name(swept.chosen)}" for swept in sweep.arms)
    return f"{sweep.key}, selected for each arm on {sweep.prompts} dev prompts: {values}."


def sweep_to_markdown(sweep: SweepResults) -> list[str]:
    """Return the lines of a table of tau on dev prompts, with the selected values in bold."""
    names = ["arm", "T", *(f"{value_name(value)}" for value in sweep.values)]
    lines = [f"Tau on dev prompts with each value of {sweep.key}, seed {sweep.seed}:", ""]
    lines += markdown_head(names, ("arm",))
    for swept in sweep.arms:
        for temperature, taus in zip(sweep.temperatures, swept.tau, strict=True):
            cells = [swept.arm, f"{temperature:g}", *_sweep_cells(sweep, swept, taus)]
            lines.append(markdown_line(cells))
    return [*lines, ""]


def _sweep_cells(sweep: SweepResults, swept: ArmSweep, taus: tuple[float, ...]) -> list[str]:
    pairs = zip(sweep.values, taus, strict=True)
    return [f"**{tau:.2f}**" if value == swept.chosen else f"{tau:.2f}" for value, tau in pairs]


_COLORS = {"base": "dim", "better": "green", "worse": "red", "not resolved": ""}
_RATIOS = ("tau_ratio", "speed_ratio", "speedup")
_SINGLE_FIELDS = (
    *("arm", "temperature", "parameters", "intermediate_size", "validation_agreement", "tau"),
    *("tokens_per_second", "seconds_per_draft", "verdict"),
)
HEADINGS = ("arm", "size", "width", "T", "tau", "tau / base", "tokens/s / base", "verdict")
_LEFT = ("arm", "trees", "verdict")
# Columns whose cells take two lines in a narrow terminal.
_FOLDING = ("arm", "trees", "tau / base", "tokens/s / base", "verdict")


def to_terminal(results: StudyResults) -> RenderableType:
    """Return the table of the results, with remarks, for a terminal."""
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
            # `Text` is used because brackets in a name would otherwise be read as markup.
            table.add_row(*map(Text, _result_cells(row)), style=_COLORS[row.verdict])
        table.add_section()
    return Group(table, *map(Text, _remarks(results)))


def to_markdown(results: StudyResults) -> str:
    """Return the results in Markdown: table, remarks, and tables of the experts and the sweep."""
    lines = markdown_head(headings_of(results), _LEFT)
    lines += [markdown_line(_result_cells(row)) for rows in results.groups for row in rows]
    lines += ["", "\n\n".join(_remarks(results)), ""]
    if results.experts:
        lines += experts_to_markdown(results.experts)
    if results.sweep is not None:
        lines += sweep_to_markdown(results.sweep)
    return "\n".join(lines)


def headings_of(results: StudyResults) -> tuple[str, ...]:
    """Return the names of the columns, including "trees" if the user specified kinds of trees."""
    before = HEADINGS.index("tau")
    return (
        HEADINGS if results.trees == [None] else (*HEADINGS[:before], "trees", *HEADINGS[before:])
    )


def to_csv(results: StudyResults) -> str:
    """Return a CSV table with all digits, and one line per arm, temperature and kind of trees."""
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


def in_words(row: ArmRow) -> str:
    """Return the main results of an arm at one temperature with one kind of trees."""
    trees = "" if row.trees is None else f", trees {row.trees}"
    ratio = "" if row.verdict == "base" else f", {with_interval(row.tau_ratio)} times the base's"
    agreement = row.validation_agreement
    known = "" if agreement is None else f"; held-out agreement {agreement:.1%}"
    return f"{row.arm} at T = {row.temperature:g}{trees}: tau {row.tau:.2f}{ratio}{known}"


def _result_cells(row: ArmRow) -> list[str]:
    is_base = row.verdict == "base"
    return [
        row.arm,
        rounded(row.parameters),
        f"{row.intermediate_size}",
        f"{row.temperature:g}",
        *([] if row.trees is None else [row.trees]),
        f"{row.tau:.2f}",
        "1" if is_base else with_interval(row.tau_ratio),
        "1" if is_base else with_interval(row.speed_ratio),
        "" if is_base else row.verdict,
    ]


def _remarks(results: StudyResults) -> Iterator[str]:
    yield results.note
    for interaction in results.interactions:
        yield interaction.sentence
    if results.sweep is not None:
        yield sweep_in_words(results.sweep)


def _record(row: ArmRow) -> dict[str, object]:
    record: dict[str, object] = {name: getattr(row, name) for name in _SINGLE_FIELDS}
    if row.trees is not None:
        record["trees"] = row.trees
    for name in _RATIOS:
        ratio: Ratio = getattr(row, name)
        record |= {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    record |= _numbered("tau_ratio_seed", row.tau_ratio.by_seed)
    record |= _numbered("training_tokens_seed", row.training_tokens)
    return record | _numbered("acceptance_depth", row.conditional_acceptance_rate, first=1)


def _numbered(name: str, values: Sequence[object], first: int = 0) -> dict[str, object]:
    return {f"{name}_{number}": value for number, value in enumerate(values, start=first)}
