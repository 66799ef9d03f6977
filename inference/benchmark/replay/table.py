"""Tables of a replay's results for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from inference.benchmark.replay.document import ReplayDocument, ReplayedCategory, ReplayRow
from inference.benchmark.report.style import fixed
from inference.benchmark.stats import Ratio
from jakiro.utils.wording import counted

_BREAKABLE = ("category", "drafter", "by depth")
LEGEND = (
    "tau: tokens per decoding step, with the 95% interval over prompts and, if there are several, "
    "trainings. An asterisk marks ratios whose interval excludes 1. by depth: share of the steps "
    "with candidates to check at each depth that accepted one of them. Speeds are not measured; "
    "larger trees and slower drafters take more time (see `jakiro bench`)."
)


def replay_tables(document: ReplayDocument) -> Iterator[RenderableType]:
    """Yield a note after an interruption, tables by temperature and size of trees, and a legend.

    If there are several categories of prompts, each table is followed by one with their results.
    """
    if not document.is_complete:
        yield "The replay was interrupted: only prompts that all drafters replayed are included."
    baseline = document.rows[0].drafter
    trainings = len(document.rows[0].counts)
    for temperature, num_tokens in document.tokens.items():
        for trees in document.settings.trees:
            shown = [
                row for row in document.rows if (row.temperature, row.trees) == (temperature, trees)
            ]
            yield _table(
                f"T = {temperature:g}, {trees}; {counted(trainings, 'training')}, "
                f"{counted(len(shown[0].counts[0]), 'prompt')}, {num_tokens:,} tokens",
                ("drafter", "tau", f"tau / {baseline}", "by depth"),
                map(_cells, shown),
            )
            if shown[0].categories:
                yield _table(
                    f"T = {temperature:g}, {trees}, by category",
                    ("category", "prompts", "drafter", "tau", f"tau / {baseline}"),
                    _category_cells(shown),
                )
    yield LEGEND


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table that breaks names and headings in a narrow terminal, but never a figure."""
    # `Text` is used because brackets in a name would otherwise be read as markup.
    table = Table(
        title=Text(title, style="table.title"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown = list(rows)
    for name, cells in zip(names, zip(*shown, strict=True), strict=True):
        if name in _BREAKABLE:
            table.add_column(Text(name), overflow="fold")
        else:
            width = max(map(len, [*cells, *name.split()]))
            table.add_column(Text(fill(name, width)), no_wrap=True)
    for row in shown:
        table.add_row(*map(Text, row))
    return table


def _cells(row: ReplayRow) -> tuple[str, ...]:
    depths = " ".join(f"{rate:.2f}".lstrip("0") for rate in row.conditional_acceptance_rate)
    return row.drafter, *_results(row), depths


def _category_cells(rows: Sequence[ReplayRow]) -> Iterator[tuple[str, ...]]:
    for name in rows[0].categories:
        for row in rows:
            category = row.categories[name]
            yield name, str(category.prompts), row.drafter, *_results(category)


def _results(results: ReplayRow | ReplayedCategory) -> tuple[str, str]:
    mark = " *" if results.ratio.is_resolved else ""
    return _figure(results.tau, 2), f"{_figure(results.ratio, 3)}{mark}"


def _figure(figure: Ratio, decimals: int) -> str:
    low, high = fixed(figure.low, decimals), fixed(figure.high, decimals)
    return f"{fixed(figure.value, decimals)} [{low}, {high}]"
