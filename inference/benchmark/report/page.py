"""A comparison as a single HTML page: a figure, a table, and what was measured."""

import shlex
import warnings
from io import StringIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.report.table import COLUMNS, INTERRUPTED, cells, notes

_LABEL_LIMIT = 46  # characters
_WIDTH, _ROW, _FIGURE = 10.0, 0.35, 2.2  # inches
_STYLE = {
    "svg.hashsalt": "report",  # the same document gives the same page
    "text.parse_math": False,  # dollar signs in a name do not start a formula
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "font.size": 9.5,
    "grid.color": "#eceff3",
    "ytick.left": False,
}


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
        interrupted=INTERRUPTED,
        picture=_picture(groups),
        command=shlex.join(document.environment.argv),
    )


def _picture(groups: dict[float, list[MethodFigures]]) -> Markup:
    """Return speed-ups and acceptance by depth at each temperature, as an `<svg>` element."""
    names = dict.fromkeys(method.name for group in groups.values() for method in group)
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    heights = [_FIGURE + _ROW * len(group) for group in groups.values()]
    target = StringIO()
    with style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        # Browsers can show characters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing|Matplotlib currently does not support")
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        rows = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
        for (left, right), (temperature, methods) in zip(rows, groups.items(), strict=True):
            left.set_title(f"speed-up at T = {temperature:g}, with 95% intervals")
            _draw_speedups(left, methods, colors)
            _draw_acceptance(right, methods, colors)
        figure.savefig(target, format="svg", metadata={"Date": None})
    drawing = target.getvalue()
    return Markup(drawing[drawing.index("<svg") :])


def _draw_speedups(axes: Axes, methods: list[MethodFigures], colors: dict[str, str]) -> None:
    values = [method.speedup for method in methods]
    errors = [
        [method.speedup - method.speedup_low for method in methods],
        [method.speedup_high - method.speedup for method in methods],
    ]
    places = range(len(methods))
    axes.barh(places, values, color=[colors[method.name] for method in methods], xerr=errors)
    axes.set_yticks(places, [_shortened(method.name) for method in methods])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")


def _draw_acceptance(axes: Axes, methods: list[MethodFigures], colors: dict[str, str]) -> None:
    axes.set(title="share of checked steps accepted, by depth", ylim=(0, 1.02), xlabel="depth")
    axes.grid(visible=True, axis="y")
    for method in methods:
        if rates := method.conditional_acceptance_rate:
            axes.plot(range(1, len(rates) + 1), rates, "o-", color=colors[method.name])


def _shortened(name: str) -> str:
    """Return a name, without its middle if it is long."""
    half = _LABEL_LIMIT // 2
    return name if len(name) <= _LABEL_LIMIT else f"{name[:half]}…{name[-half:]}"
