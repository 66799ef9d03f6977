"""The results of a study as a table: for the terminal, as Markdown, and as CSV."""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from training.ablation.experts_table import experts_to_markdown
from training.ablation.markdown import markdown_head, markdown_line
from training.ablation.results import ArmRow, StudyResults
from training.ablation.sweep_table import sweep_in_words, sweep_to_markdown
from training.ablation.uncertainty import Ratio

_COLORS = {"base": "dim", "better": "green", "worse": "red", "not resolved": ""}
_RATIOS = ("tau_ratio", "speed_ratio", "speedup")
_PLAIN_FIELDS = (
    *("arm", "temperature", "parameters", "expert_width", "held_out_agreement", "tau"),
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
            table.add_row(*map(Text, _cells(row)), style=_COLORS[row.verdict])
        table.add_section()
    return Group(table, *map(Text, _remarks(results)))


def to_markdown(results: StudyResults) -> str:
    """Return the table and remarks as Markdown, then tables of experts and of the sweep."""
    lines = markdown_head(headings_of(results), _LEFT)
    lines += [markdown_line(_cells(row)) for rows in results.groups for row in rows]
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


def _cells(row: ArmRow) -> list[str]:
    is_base = row.verdict == "base"
    return [
        row.arm,
        _short(row.parameters),
        f"{row.expert_width}",
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
