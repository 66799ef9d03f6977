"""Figures of the report: speed, time per token by phase, expert load, and acceptance by depth."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from inference.benchmark.document import MethodFigures
from inference.benchmark.report.canvas import INK, MUTED, PAPER, SMALL, picture
from inference.benchmark.report.style import (
    PHASES,
    Look,
    Looks,
    expert_color,
    fixed,
    interval,
    percent,
    significant,
    text_on,
)

WIDTH = 460  # pixels; fits a phone, and two figures fit side by side

_MARGIN = 8
_NAME_HEIGHT = 22
_AXIS_HEIGHT = 40

PaintRow = Callable[[Axes, int, MethodFigures], None]


@dataclass(frozen=True)
class RowAxis:
    """The horizontal axis that all rows share.

    Attributes:
        limit: right end of the axis, which begins at 0.
        label: quantity on the axis; an empty label hides the axis.
        left: number of pixels to the left of 0.
        line: position of a vertical line through all rows; None to draw no line.
    """

    limit: float
    label: str = ""
    left: int = _MARGIN
    line: float | None = None


def method_rows(
    name: str,
    methods: Sequence[MethodFigures],
    looks: Looks,
    axis: RowAxis,
    paint: PaintRow,
    *,
    height: int,
    alt: str,
) -> Markup:
    """Return a figure with a row for each method.

    Args:
        name: name of the figure, unique on the page.
        methods: methods from top to bottom.
        looks: labels and colors of the methods.
        axis: horizontal axis of all rows.
        paint: function that draws a method's row on the axes, given the distance of the row's
            drawing from the top, in pixels.
        height: height of a row's drawing, in pixels.
        alt: alternative text of the figure.
    """
    row_height = height + _NAME_HEIGHT
    below = _AXIS_HEIGHT if axis.label else 0
    size = (WIDTH, row_height * len(methods) + below)

    def paint_all(figure: Figure) -> None:
        axes = _axes(figure, axis, size, below)
        for row, method in enumerate(methods):
            _write_name(axes, looks[method.name].label, axis.left, row * row_height)
            paint(axes, row * row_height + _NAME_HEIGHT, method)

    return picture(name, size, paint_all, alt=alt)


def _axes(figure: Figure, axis: RowAxis, size: tuple[int, int], below: int) -> Axes:
    width, height = size
    bounds = (axis.left, below, width - axis.left - _MARGIN, height - below)
    shares = [bounds[0] / width, bounds[1] / height, bounds[2] / width, bounds[3] / height]
    axes = figure.add_axes((shares[0], shares[1], shares[2], shares[3]))
    axes.set(xlim=(0, axis.limit), ylim=(height - below, 0), xlabel=axis.label)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.yaxis.set_visible(False)
    axes.xaxis.set_visible(bool(axis.label))
    axes.grid(visible=bool(axis.label), axis="x")
    if axis.line is not None:
        axes.axvline(axis.line, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    return axes


def _write_name(axes: Axes, label: str, left: int, top: int) -> None:
    axes.annotate(
        label,
        (0, 1),
        (_MARGIN - left, -top - _NAME_HEIGHT / 2),
        xycoords="axes fraction",
        textcoords="offset pixels",
        va="center",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},  # hides the grid
    )


Methods = Sequence[MethodFigures]
Style = dict[str, Any]  # keyword arguments of matplotlib functions

_ROOM = 0.7  # share of the width for bars; the rest is for the text to their right
_LEGEND_LINE = 16
_MOST_DOTS = 200


def speedups(methods: Methods, looks: Looks, limit: float, *, name: str, baseline: str) -> Markup:
    """Return bars of speed-ups with their intervals; a line marks the baseline's speed.

    Args:
        methods: methods from top to bottom.
        looks: labels and colors of the methods.
        limit: largest of all speed-ups and upper ends of their intervals.
        name: name of the figure, unique on the page.
        baseline: name of the method that speed-ups refer to.
    """
    listed = ", ".join(f"{method.name} {fixed(method.speedup)}" for method in methods)
    label = f"times the speed of {looks[baseline].label}"
    axis = RowAxis(limit / _ROOM, label, line=1.0)
    paint = partial(_speedup, looks)
    alt = f"Speed-up over {baseline}: {listed}"
    return method_rows(name, methods, looks, axis, paint, height=20, alt=alt)


def times(methods: Methods, looks: Looks, limit: float, *, name: str) -> Markup:
    """Return stacked bars of the milliseconds per token, by phase.

    Args:
        methods: methods from top to bottom.
        looks: labels and colors of the methods.
        limit: largest number of milliseconds per token.
        name: name of the figure, unique on the page.
    """
    listed = ", ".join(
        f"{method.name} {significant(token_milliseconds(method))}" for method in methods
    )
    axis = RowAxis(limit / 0.84, "milliseconds per token")
    return method_rows(
        name, methods, looks, axis, _times, height=20, alt=f"Milliseconds per token: {listed}"
    )


def sample_speeds(methods: Methods, looks: Looks, limit: float, *, name: str) -> Markup:
    """Return dots for the speeds of samples, and a line at each method's median.

    Args:
        methods: methods from top to bottom.
        looks: labels and colors of the methods.
        limit: highest speed of a sample, in tokens per second.
        name: name of the figure, unique on the page.
    """
    medians = ", ".join(
        f"{method.name} {significant(median(_speeds(method)))}" for method in methods
    )
    axis = RowAxis(1.04 * limit, "tokens per second")
    paint = partial(_speed_dots, looks)
    alt = f"Tokens per second of the samples; medians: {medians}"
    return method_rows(name, methods, looks, axis, paint, height=18, alt=alt)


def expert_load(methods: Methods, looks: Looks, *, name: str) -> Markup:
    """Return bars of the experts' shares of candidates and of accepted drafts for each method.

    Args:
        methods: methods with figures of experts, from top to bottom.
        looks: labels and colors of the methods.
        name: name of the figure, unique on the page.
    """
    axis = RowAxis(1.0, left=80)
    alt = "Each expert's share of candidates, share of accepted drafts, and acceptance rate"
    return method_rows(name, methods, looks, axis, _experts, height=62, alt=alt)


def acceptance(methods: Methods, looks: Looks, *, name: str) -> Markup:
    """Return lines of the conditional acceptance rate and of the acceptance rate at each depth.

    Args:
        methods: methods that draft.
        looks: labels and colors of the methods.
        name: name of the figure, unique on the page.
    """
    listed = ", ".join(
        f"{method.name} {percent(method.conditional_acceptance_rate[0])}" for method in methods
    )
    size = (WIDTH, 232 + _LEGEND_LINE * len(methods))
    paint = partial(_acceptance, methods, looks, size[1])
    return picture(name, size, paint, alt=f"Acceptance by depth; at depth 1: {listed}")


def token_milliseconds(figures: MethodFigures) -> float:
    """Return the milliseconds per token, including prefill."""
    return sum(_phases(figures).values())


def sample_limit(methods: Methods) -> float:
    """Return the highest speed of any sample."""
    return largest(speed for method in methods for speed in _speeds(method))


def largest(values: Iterable[float]) -> float:
    """Return the largest finite value; 1 if no value is above zero."""
    return max((value for value in values if math.isfinite(value) and value > 0), default=1.0)


def _speedup(looks: Looks, axes: Axes, top: int, method: MethodFigures) -> None:
    look, middle = looks[method.name], top + 7
    axes.barh(middle, method.speedup, 14, color=look.color, hatch=look.hatch, linewidth=0)
    ends, label = (method.speedup_low, method.speedup_high), fixed(method.speedup)
    if ends[0] != ends[1]:
        style: Style = {"linewidth": 1.6, "markersize": 8, "markeredgewidth": 1.6}
        axes.plot(ends, (middle, middle), "|-", color=INK, **style)
        label += f"  {interval(*ends)}"
    _write(axes, max(method.speedup, ends[1]), middle, label)


def _times(axes: Axes, top: int, method: MethodFigures) -> None:
    start, middle = 0.0, top + 8
    for phase, length in _phases(method).items():
        color = PHASES[phase]
        _segment(axes, start, middle, length, 16, color, significant(length))
        start += length
    _write(axes, start, middle, f"{significant(start)} ms")


def _speed_dots(looks: Looks, axes: Axes, top: int, method: MethodFigures) -> None:
    look, speeds = looks[method.name], _speeds(method)
    shown = speeds[:: 1 + len(speeds) // _MOST_DOTS]
    # Three lanes separate dots that would otherwise overlap.
    heights = [top + 3 + 5 * (index % 3) for index in range(len(shown))]
    style: Style = {"markersize": 5, "markeredgewidth": 0.6, "markeredgecolor": PAPER}
    axes.plot(shown, heights, look.marker, color=look.color, alpha=0.8, **style)
    axes.plot([median(speeds)] * 2, (top - 1, top + 17), color=INK, linewidth=1.8)


def _experts(axes: Axes, top: int, method: MethodFigures) -> None:
    bars = {
        "proposed": [expert.proposed for expert in method.experts],
        "accepted": [expert.accepted for expert in method.experts],
    }
    for line, (label, counts) in enumerate(bars.items()):
        middle, start = top + 8 + 18 * line, 0.0
        _write_left(axes, middle, label)
        for expert, count in zip(method.experts, counts, strict=True):
            share = count / max(1, sum(counts))
            color = expert_color(expert.expert)
            _segment(axes, start, middle, share, 15, color, percent(share))
            start += share
    _write_left(axes, top + 45, "acceptance")
    for index, expert in enumerate(method.experts):
        x = (index + 0.5) / max(8, len(method.experts))
        style: Style = {"boxstyle": "round,pad=0.25", "facecolor": expert_color(expert.expert)}
        label = fixed(expert.acceptance)
        box = {**style, "edgecolor": "none"}
        text = text_on(expert_color(expert.expert))
        axes.text(x, top + 45, label, color=text, size=9.5, ha="center", va="center", bbox=box)


def _acceptance(methods: Methods, looks: Looks, height: int, figure: Figure) -> None:
    legend = _LEGEND_LINE * len(methods)
    bottom, tall = (legend + 40) / height, 168 / height
    left = figure.add_axes(
        (40 / WIDTH, bottom, 200 / WIDTH, tall), title="share of checked steps accepted"
    )
    right = figure.add_axes(
        (254 / WIDTH, bottom, 200 / WIDTH, tall), title="share of all steps accepted"
    )
    _depth_axes(left)
    _depth_axes(right)
    right.tick_params(labelleft=False)
    lines = [_lines(left, right, method, looks[method.name]) for method in methods]
    labels = [looks[method.name].label for method in methods]
    corner: Style = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.0)}
    figure.legend(lines, labels, handlelength=3.2, labelspacing=0.55, **corner)


def _lines(left: Axes, right: Axes, method: MethodFigures, look: Look) -> Line2D:
    style: Style = {
        "markersize": 5,
        "linewidth": 1.7,
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.6,
    }
    style |= {"linestyle": look.dash, "marker": look.marker, "color": look.color}
    conditional = method.conditional_acceptance_rate
    left.plot(range(1, len(conditional) + 1), conditional, **style)
    per_position = method.acceptance_rate_per_position
    return right.plot(range(1, len(per_position) + 1), per_position, **style)[0]


def _depth_axes(axes: Axes) -> None:
    axes.set(ylim=(0, 1.02), xlabel="depth")
    axes.title.set_color(MUTED)
    axes.grid(visible=True, axis="y")
    axes.tick_params(length=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _segment(
    axes: Axes, start: float, middle: int, length: float, height: int, color: str, label: str
) -> None:
    """Draw a part of a bar, and its label if there is room."""
    axes.barh(middle, length, height, left=start, color=color, linewidth=0)
    pixels = length / axes.get_xlim()[1] * axes.get_position().width * WIDTH
    if pixels > 6 * len(label) + 4:
        center = (start + length / 2, middle + 0.5)
        axes.text(*center, label, color=text_on(color), size=9.5, ha="center", va="center")


def _write(axes: Axes, x: float, y: int, label: str) -> None:
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    style: Style = {"textcoords": "offset pixels", "va": "center", "size": SMALL, "bbox": box}
    axes.annotate(label, (x, y), (8, -0.5), **style)


def _write_left(axes: Axes, y: int, label: str) -> None:
    style: Style = {"textcoords": "offset pixels", "va": "center", "ha": "right", "size": SMALL}
    axes.annotate(label, (0, y), (-8, 0), color=MUTED, **style)


def _phases(method: MethodFigures) -> dict[str, float]:
    seconds, tokens = method.seconds, max(1, method.tokens)
    return {phase: 1000 * getattr(seconds, phase) / tokens for phase in PHASES}


def _speeds(method: MethodFigures) -> list[float]:
    samples = [sample for sample in method.samples if sample.seconds]
    return [sample.tokens / sample.seconds for sample in samples] or [0.0]
