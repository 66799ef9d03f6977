"""The report's figures: speed, where time goes, who proposes, what is accepted at which depth."""

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

WIDTH = 460  # pixels of every figure: it fits a phone, and two fit beside each other

_MARGIN = 8
_NAME_HEIGHT = 22
_AXIS_HEIGHT = 40

PaintRow = Callable[[Axes, int, MethodFigures], None]


@dataclass(frozen=True)
class RowAxis:
    """The horizontal axis that all rows share.

    Attributes:
        limit: it goes from 0 to this.
        label: what it measures; empty: the axis is not shown.
        left: pixels left of 0.
        line: where a line crosses all rows.
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
        name: of the figure, unique on the page.
        methods: from top to bottom.
        looks: what they are called.
        axis: what they share.
        paint: draws a method's row on the axes, below a height; one unit of height is one pixel.
        height: of what it draws, in pixels.
        alt: what the figure says, in words.
    """
    row_height = height + _NAME_HEIGHT
    below = _AXIS_HEIGHT if axis.label else 0
    size = (WIDTH, row_height * len(methods) + below)

    def paint_all(figure: Figure) -> None:
        axes = _axes(figure, axis, size, below)
        for row, one in enumerate(methods):
            _write_name(axes, looks[one.name].label, axis.left, row * row_height)
            paint(axes, row * row_height + _NAME_HEIGHT, one)

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
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},  # no grid behind the name
    )


Methods = Sequence[MethodFigures]
Style = dict[str, Any]  # keyword arguments of matplotlib's

_ROOM = 0.7  # share of the width for bars; the rest is for what is written behind them
_LEGEND_LINE = 16
_MOST_DOTS = 200


def speedups(methods: Methods, looks: Looks, limit: float, *, name: str, baseline: str) -> Markup:
    """Return bars of speed-ups with their intervals; a line marks the baseline's speed."""
    said = ", ".join(f"{one.name} {fixed(one.speedup)}" for one in methods)
    label = f"times the speed of {looks[baseline].label}"
    axis = RowAxis(limit / _ROOM, label, line=1.0)
    paint = partial(_speedup, looks)
    alt = f"Speed-up over {baseline}: {said}"
    return method_rows(name, methods, looks, axis, paint, height=20, alt=alt)


def times(methods: Methods, looks: Looks, limit: float, *, name: str) -> Markup:
    """Return stacked bars of the milliseconds that one token takes, by phase."""
    said = ", ".join(f"{one.name} {significant(token_milliseconds(one))}" for one in methods)
    axis = RowAxis(limit / 0.84, "milliseconds per token")
    return method_rows(
        name, methods, looks, axis, _times, height=20, alt=f"Milliseconds per token: {said}"
    )


def sample_speeds(methods: Methods, looks: Looks, limit: float, *, name: str) -> Markup:
    """Return a dot for the speed of every sample, and a line at each method's median."""
    medians = ", ".join(f"{one.name} {significant(median(_speeds(one)))}" for one in methods)
    axis = RowAxis(1.04 * limit, "tokens per second")
    paint = partial(_speed_dots, looks)
    alt = f"Tokens per second of every sample; medians: {medians}"
    return method_rows(name, methods, looks, axis, paint, height=18, alt=alt)


def expert_load(methods: Methods, looks: Looks, *, name: str) -> Markup:
    """Return for each method the experts' shares of candidates and of accepted drafts."""
    axis = RowAxis(1.0, left=80)
    alt = "Each expert's share of the candidates, its share of what was accepted, its acceptance"
    return method_rows(name, methods, looks, axis, _experts, height=62, alt=alt)


def acceptance(methods: Methods, looks: Looks, *, name: str) -> Markup:
    """Return lines of conditional and of marginal acceptance by depth."""
    said = ", ".join(f"{one.name} {percent(one.acceptance_by_depth[0])}" for one in methods)
    size = (WIDTH, 232 + _LEGEND_LINE * len(methods))
    paint = partial(_acceptance, methods, looks, size[1])
    return picture(name, size, paint, alt=f"Acceptance by depth; at depth 1: {said}")


def token_milliseconds(figures: MethodFigures) -> float:
    """Return how long one token takes, reading the prompt included."""
    return sum(_phases(figures).values())


def sample_limit(methods: Methods) -> float:
    """Return the highest speed of any sample."""
    return largest(speed for one in methods for speed in _speeds(one))


def largest(values: Iterable[float]) -> float:
    """Return the largest finite value; 1 where there is none above zero."""
    return max((one for one in values if math.isfinite(one) and one > 0), default=1.0)


def _speedup(looks: Looks, axes: Axes, top: int, one: MethodFigures) -> None:
    look, middle = looks[one.name], top + 7
    axes.barh(middle, one.speedup, 14, color=look.color, hatch=look.hatch, linewidth=0)
    ends, said = (one.speedup_low, one.speedup_high), fixed(one.speedup)
    if ends[0] != ends[1]:
        style: Style = {"linewidth": 1.6, "markersize": 8, "markeredgewidth": 1.6}
        axes.plot(ends, (middle, middle), "|-", color=INK, **style)
        said += f"  {interval(*ends)}"
    _write(axes, max(one.speedup, ends[1]), middle, said)


def _times(axes: Axes, top: int, one: MethodFigures) -> None:
    start, middle = 0.0, top + 8
    for phase, length in _phases(one).items():
        color = PHASES[phase]
        _segment(axes, start, middle, length, 16, color, significant(length))
        start += length
    _write(axes, start, middle, f"{significant(start)} ms")


def _speed_dots(looks: Looks, axes: Axes, top: int, one: MethodFigures) -> None:
    look, speeds = looks[one.name], _speeds(one)
    shown = speeds[:: 1 + len(speeds) // _MOST_DOTS]
    # Three lanes part dots that would cover each other.
    heights = [top + 3 + 5 * (place % 3) for place in range(len(shown))]
    style: Style = {"markersize": 5, "markeredgewidth": 0.6, "markeredgecolor": PAPER}
    axes.plot(shown, heights, look.marker, color=look.color, alpha=0.8, **style)
    axes.plot([median(speeds)] * 2, (top - 1, top + 17), color=INK, linewidth=1.8)


def _experts(axes: Axes, top: int, one: MethodFigures) -> None:
    columns = {
        "proposed": [expert.proposed for expert in one.experts],
        "accepted": [expert.accepted for expert in one.experts],
    }
    for line, (label, counts) in enumerate(columns.items()):
        middle, start = top + 8 + 18 * line, 0.0
        _write_left(axes, middle, label)
        for expert, count in zip(one.experts, counts, strict=True):
            share = count / max(1, sum(counts))
            color = expert_color(expert.expert)
            _segment(axes, start, middle, share, 15, color, percent(share))
            start += share
    _write_left(axes, top + 45, "acceptance")
    for place, expert in enumerate(one.experts):
        at = (place + 0.5) / max(8, len(one.experts))
        style: Style = {"boxstyle": "round,pad=0.25", "facecolor": expert_color(expert.expert)}
        said = fixed(expert.acceptance)
        box = {**style, "edgecolor": "none"}
        text = text_on(expert_color(expert.expert))
        axes.text(at, top + 45, said, color=text, size=9.5, ha="center", va="center", bbox=box)


def _acceptance(methods: Methods, looks: Looks, height: int, figure: Figure) -> None:
    legend = _LEGEND_LINE * len(methods)
    bottom, tall = (legend + 40) / height, 168 / height
    left = figure.add_axes((40 / WIDTH, bottom, 200 / WIDTH, tall), title="where one was tried")
    right = figure.add_axes((254 / WIDTH, bottom, 200 / WIDTH, tall), title="of all rounds")
    _depth_axes(left)
    _depth_axes(right)
    right.tick_params(labelleft=False)
    lines = [_lines(left, right, one, looks[one.name]) for one in methods]
    labels = [looks[one.name].label for one in methods]
    corner: Style = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.0)}
    figure.legend(lines, labels, handlelength=3.2, labelspacing=0.55, **corner)


def _lines(left: Axes, right: Axes, one: MethodFigures, look: Look) -> Line2D:
    style: Style = {
        "markersize": 5,
        "linewidth": 1.7,
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.6,
    }
    style |= {"linestyle": look.dash, "marker": look.marker, "color": look.color}
    left.plot(range(1, len(one.acceptance_by_depth) + 1), one.acceptance_by_depth, **style)
    marginal = one.marginal_acceptance_by_depth
    return right.plot(range(1, len(marginal) + 1), marginal, **style)[0]


def _depth_axes(axes: Axes) -> None:
    axes.set(ylim=(0, 1.02), xlabel="depth")
    axes.title.set_color(MUTED)
    axes.grid(visible=True, axis="y")
    axes.tick_params(length=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _segment(
    axes: Axes, start: float, middle: int, length: float, height: int, color: str, said: str
) -> None:
    """Draw a part of a bar, and what it says if there is room."""
    axes.barh(middle, length, height, left=start, color=color, linewidth=0)
    pixels = length / axes.get_xlim()[1] * axes.get_position().width * WIDTH
    if pixels > 6 * len(said) + 4:
        place = (start + length / 2, middle + 0.5)
        axes.text(*place, said, color=text_on(color), size=9.5, ha="center", va="center")


def _write(axes: Axes, x: float, y: int, said: str) -> None:
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    style: Style = {"textcoords": "offset pixels", "va": "center", "size": SMALL, "bbox": box}
    axes.annotate(said, (x, y), (8, -0.5), **style)


def _write_left(axes: Axes, y: int, said: str) -> None:
    style: Style = {"textcoords": "offset pixels", "va": "center", "ha": "right", "size": SMALL}
    axes.annotate(said, (0, y), (-8, 0), color=MUTED, **style)


def _phases(one: MethodFigures) -> dict[str, float]:
    return {phase: 1000 * getattr(one.seconds, phase) / max(1, one.tokens) for phase in PHASES}


def _speeds(one: MethodFigures) -> list[float]:
    return [sample.tokens / sample.seconds for sample in one.samples if sample.seconds] or [0.0]
