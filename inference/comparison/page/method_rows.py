"""Figures with a row for each method, whose name stands above its bar: names may be long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.comparison.document import MethodFigures
from inference.comparison.page.canvas import MUTED, PAPER, picture
from inference.comparison.page.palette import Looks

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
