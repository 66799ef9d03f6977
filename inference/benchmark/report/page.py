"""A comparison as a single HTML page: a figure, a table, and what was measured."""

import shlex
from io import StringIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.report.style import INK, THEME, Look, any_character, looks_of, short_names
from inference.benchmark.report.table import COLUMNS, cells, notes

_LABEL_LIMIT = 46  # characters
_WIDTH, _ROW, _FIGURE = 10.0, 0.35, 2.2  # inches


def render(document: ComparisonDocument) -> str:
    """Return a page that needs no other file; the same document always gives the same page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    temperatures = dict.fromkeys(method.temperature for method in document.methods)
    groups = {
        temperature: [method for method in document.methods if method.temperature == temperature]
        for temperature in temperatures
    }
    return environment.get_template("report.html.jinja").render(
        document=document,
        target=document.environment.target,
        groups=groups,
        columns=COLUMNS,
        cells=cells,
        notes=list(notes(document)),
        picture=_picture(groups),
        command=shlex.join(document.environment.argv),
    )


def _picture(groups: dict[float, list[MethodFigures]]) -> Markup:
    """Return speed-ups and acceptance by depth at each temperature, as an `<svg>` element."""
    names = list(dict.fromkeys(method.name for group in groups.values() for method in group))
    looks = looks_of(short_names(names, _LABEL_LIMIT))
    heights = [_FIGURE + _ROW * len(group) for group in groups.values()]
    target = StringIO()
    with style.context({**THEME, "svg.hashsalt": "report"}, after_reset=True), any_character():
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        rows = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
        for (left, right), (temperature, methods) in zip(rows, groups.items(), strict=True):
            _draw_speedups(left, temperature, methods, looks)
            _draw_acceptance(right, methods, looks)
        figure.savefig(target, format="svg", metadata={"Date": None})
    drawing = target.getvalue()
    return Markup(drawing[drawing.index("<svg") :])


def _draw_speedups(
    axes: Axes, temperature: float, methods: list[MethodFigures], looks: dict[str, Look]
) -> None:
    axes.set(title=f"speed-up at T = {temperature:g}, with 95% intervals")
    axes.barh(
        [looks[method.name].label for method in methods],
        [method.speedup for method in methods],
        color=[looks[method.name].color for method in methods],
        xerr=[
            [method.speedup - method.speedup_low for method in methods],
            [method.speedup_high - method.speedup for method in methods],
        ],
        ecolor=INK,
    )
    axes.invert_yaxis()
    axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")


def _draw_acceptance(axes: Axes, methods: list[MethodFigures], looks: dict[str, Look]) -> None:
    axes.set(title="share of checked steps accepted, by depth", ylim=(0, 1.02), xlabel="depth")
    axes.grid(visible=True, axis="y")
    for method in methods:
        if rates := method.conditional_acceptance_rate:
            look = looks[method.name]
            axes.plot(range(1, len(rates) + 1), rates, look.marker + look.dash, color=look.color)
