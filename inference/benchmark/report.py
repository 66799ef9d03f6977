"""Reports of a comparison: tables for a terminal, and one HTML page with a figure and a table."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.stats import FEWEST_PROMPTS, TAU, product, rate_of, ratio

COLUMNS = ("method", "tau", "drafts", "tok/s", "speed-up [95%]", "first", "same")
INTERRUPTED = "The measurement was interrupted: only prompts that all methods decoded are included."
LEGEND = (
    "tau: tokens per forward pass of the target. drafts: share of these passes with drafts. tok/s: "
    "new tokens divided by all seconds. first: median milliseconds to the first token. same: share "
    "of greedy answers that equal those of generate()."
)
REPLAY_LEGEND = (
    "tau: tokens per decoding step, with the 95% interval over prompts and, if there are several, "
    "trainings. An asterisk marks ratios whose interval excludes 1. by depth: share of the steps "
    "with candidates to check at each depth that accepted one of them. Speeds are not measured; "
    "larger trees and slower drafters take more time."
)
_WIDTH, _ROW, _FIGURE = 10.0, 0.35, 2.2  # inches
_COLUMNS = 120  # of the text in a page
_STYLE = {
    "svg.hashsalt": "report",  # the same document gives the same page
    "text.parse_math": False,  # dollar signs in a name do not start a formula
}


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with its first column on the left; only the first and the last one wrap."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):  # brackets in a text would be read as markup
        is_fixed = 0 < number < len(columns) - 1
        justify: Any = "right" if number else "left"
        table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=is_fixed)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def show(document: ComparisonDocument, console: Console) -> None:
    """Print a note after an interruption, a table for each temperature, and a legend."""
    for part in _parts(document):
        console.print(part, highlight=False)


def _parts(document: ComparisonDocument) -> Iterator[Table | str]:
    if not document.is_complete:
        yield INTERRUPTED
    table = _replay_table if document.settings.replay else _speed_table
    for temperature in dict.fromkeys(method.temperature for method in document.methods):
        yield table(document, temperature)
    yield from [REPLAY_LEGEND] if document.settings.replay else notes(document)


def _speed_table(document: ComparisonDocument, temperature: float) -> Table:
    return table_of(
        f"T = {temperature:g}, {document.prompts} prompts; speed-up over {document.baseline}",
        COLUMNS,
        [cells(method) for method in document.methods if method.temperature == temperature],
    )


def _replay_table(document: ComparisonDocument, temperature: float) -> Table:
    """Return the table of a replay at a temperature.

    Raises:
        DataError: all texts at the temperature end with their first token.
    """
    trainings: dict[str, list[MethodFigures]] = {}
    for method in document.methods:
        if method.temperature == temperature:
            trainings.setdefault(str(method.family), []).append(method)
    base = trainings[document.baseline]
    units = sorted({sample.prompt for sample in base[0].samples})
    rates = {
        name: rate_of([one.samples for one in of_name], TAU, units)
        for name, of_name in trainings.items()
    }
    rows = []
    for name, rate in rates.items():
        compared = ratio(rate, rates[document.baseline])
        shares = zip(*(one.conditional_acceptance_rate for one in trainings[name]), strict=False)
        rows.append(
            (
                name,
                product([(1.0, rate)]).shown(2),
                compared.shown(3) + " *" * compared.is_resolved,
                " ".join(f"{fmean(at_depth):.2f}" for at_depth in shares),
            )
        )
    return table_of(
        f"T = {temperature:g}; trainings: {len(base)}, prompts: {len(units)}, "
        f"tokens: {base[0].tokens:,}",
        ("drafter", "tau", f"tau / {document.baseline}", "by depth"),
        rows,
    )


def notes(document: ComparisonDocument) -> Iterator[str]:
    """Yield what a reader of the table must know."""
    yield LEGEND
    yield f"Weights of the target: {document.environment.target.weights}."
    if any(method.identical_share not in (None, 1.0) for method in document.methods):
        yield (
            "Answers that differ need not be wrong: when several tokens are computed together, "
            "logits are rounded differently, which can decide between tokens that are almost "
            "equally likely. `jakiro verify` checks that nothing else differs."
        )
    if any(_has_too_few(method) for method in document.methods):
        yield f"Intervals need at least {FEWEST_PROMPTS} prompts."
    load, processors = document.environment.load_average, document.environment.num_cpus
    if load is not None and processors is not None and load > 1.5 * processors:
        yield (
            f"Other programs ran when the measurement started (load average {load:.1f} on "
            f"{processors} processors), so speeds are unreliable."
        )


def cells(figures: MethodFigures) -> tuple[str, ...]:
    """Return the figures of a method as shown in `COLUMNS`."""
    limits = f" [{figures.speedup_low:.2f}, {figures.speedup_high:.2f}]"
    return (
        figures.name,
        f"{figures.tau:.2f}",
        "-" if figures.drafting_share is None else f"{figures.drafting_share:.0%}",
        f"{figures.tokens_per_second:.1f}",
        f"{figures.speedup:.2f}{'' if _has_too_few(figures) else limits}",
        f"{figures.seconds_to_first_token * 1e3:.0f}",
        "-" if figures.identical_share is None else f"{figures.identical_share:.0%}",
    )


def _has_too_few(figures: MethodFigures) -> bool:
    return len({sample.group for sample in figures.samples}) < FEWEST_PROMPTS


def page_of(document: ComparisonDocument) -> str:
    """Return an HTML page with a picture, the tables, and the settings; it needs no other file."""
    console = Console(file=StringIO(), record=True, width=_COLUMNS)
    show(document, console)
    facts = document.model_dump(mode="json", include={"environment", "settings"})
    console.print_json(data=facts)
    start, body, end = console.export_html(inline_styles=True).partition("<body>")
    return f"{start}{body}\n{_picture(document)}\n{end}"


def _picture(document: ComparisonDocument) -> str:
    """Return speed-ups and acceptance by depth at each temperature, as an `<svg>` element."""
    from matplotlib import style  # an optional package, which takes a second to import
    from matplotlib.figure import Figure

    groups: dict[float, list[MethodFigures]] = {}
    for method in document.methods:
        groups.setdefault(method.temperature, []).append(method)
    names = dict.fromkeys(method.name for method in document.methods)
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    heights = [_FIGURE + _ROW * len(group) for group in groups.values()]
    target = StringIO()
    with style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        # Browsers can show characters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing|Matplotlib currently does not support")
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        pairs = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
        for (left, right), (temperature, methods) in zip(pairs, groups.items(), strict=True):
            left.set_title(f"speed-up at T = {temperature:g}, with 95% intervals")
            _draw_speedups(left, methods, colors)
            _draw_acceptance(right, methods, colors)
        figure.savefig(target, format="svg", metadata={"Date": None})
    drawing = target.getvalue()
    return drawing[drawing.index("<svg") :]


def _draw_speedups(axes: Any, methods: list[MethodFigures], colors: dict[str, str]) -> None:
    values = [method.speedup for method in methods]
    errors = [
        [method.speedup - method.speedup_low for method in methods],
        [method.speedup_high - method.speedup for method in methods],
    ]
    rows = range(len(methods))
    axes.barh(rows, values, color=[colors[method.name] for method in methods], xerr=errors)
    axes.set_yticks(rows, [method.name for method in methods])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")


def _draw_acceptance(axes: Any, methods: list[MethodFigures], colors: dict[str, str]) -> None:
    axes.set(title="share of checked steps accepted, by depth", ylim=(0, 1.02), xlabel="depth")
    axes.grid(visible=True, axis="y", alpha=0.3)
    for method in methods:
        if rates := method.conditional_acceptance_rate:
            axes.plot(range(1, len(rates) + 1), rates, "o-", color=colors[method.name])
