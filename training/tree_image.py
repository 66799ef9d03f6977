"""One draft tree as pixels, for those who cannot show a page."""

from typing import Any

import numpy as np
from jaxtyping import UInt8
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from inference.comparison.document import ExampleTree
from inference.comparison.page.canvas import any_character
from inference.comparison.page.palette import expert_color
from inference.comparison.page.tree_layout import GAP, Box, TreeLayout, lay_out
from training.plot_theme import INK, LINE, THEME

_ACCEPTED, _TARGETS, _EDGE = "#009e73", "#ffffff", 9.0
_BOX = 20  # height in pixels of the layout
_SCALE = 2  # pixels of the image for one of the layout
_INCH = 72  # pixels of the layout
_FONT: dict[str, Any] = {"family": "monospace", "size": 11.5, "ha": "center", "va": "center"}


def tree_image(tree: ExampleTree) -> UInt8[np.ndarray, "height width 3"]:
    """Return a picture of a tree: a colour for each expert, the accepted path with a thick line."""
    layout = lay_out(tree)
    width, height = layout.size
    with style.context(THEME, after_reset=True), any_character():
        size = (width / _INCH, height / _INCH)
        figure = Figure(figsize=size, dpi=_INCH * _SCALE, facecolor="#ffffff")
        canvas = FigureCanvasAgg(figure)
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        _paint(axes, layout)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _paint(axes: Axes, layout: TreeLayout) -> None:
    for box in layout.in_order:
        _paint_edge(axes, layout, box)
    for box in layout.boxes:
        _paint_box(axes, box, layout.lefts[box.depth], layout.widths[box.depth])
    for depth in range(1, len(layout.lefts)):
        middle = layout.lefts[depth] + layout.widths[depth] / 2
        axes.text(middle, _EDGE, str(depth), color=INK, **_FONT)


def _paint_edge(axes: Axes, layout: TreeLayout, box: Box) -> None:
    if box.parent is None:
        return
    start = layout.lefts[box.parent.depth] + layout.widths[box.parent.depth]
    end, turn = layout.lefts[box.depth], start + GAP / 2
    heights = (box.parent.middle, box.parent.middle, box.middle, box.middle)
    axes.plot((start, turn, turn, end), heights, zorder=1, **_line(box))


def _paint_box(axes: Axes, box: Box, left: float, width: float) -> None:
    fill = _TARGETS if box.expert is None else expert_color(box.expert)
    shape = FancyBboxPatch(
        (left + 1, box.middle - _BOX / 2),
        width - 2,
        _BOX,
        boxstyle="round,pad=0,rounding_size=4",
        facecolor=fill,
        edgecolor=_line(box)["color"],
        linewidth=_line(box)["linewidth"],
        zorder=2,
    )
    axes.add_patch(shape)
    axes.text(left + width / 2, box.middle + 1, box.text, color=INK, zorder=3, **_FONT)


def _line(box: Box) -> dict[str, Any]:
    accepted = {"color": _ACCEPTED, "linewidth": 2.0}
    return accepted if box.is_accepted else {"color": LINE, "linewidth": 1.0}
