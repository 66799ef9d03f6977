"""A learning curve as a picture: agreement, loss and tau over the tokens of data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from training.learning_verdict import Point
from training.plot_theme import THEME

_COLOR = "#0072b2"
_PANEL = (3.2, 2.8)  # inches


def plot(points: Sequence[Point], sentence: str, path: Path) -> None:
    """Write a PNG with one panel for each measure, and the verdict below."""
    measures = ["agreement", "loss"]
    if all(point.tau is not None for point in points):
        measures.append("tau")
    with style.context(THEME, after_reset=True):
        width, height = _PANEL
        size = (width * len(measures), height)
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        for panel, name in zip(figure.subplots(1, len(measures)), measures, strict=True):
            _paint(panel, name, points)
        figure.supxlabel(f"tokens of data\n{sentence}", fontsize=7.5, wrap=True)
        figure.savefig(path, format="png")


def _paint(panel: Any, name: str, points: Sequence[Point]) -> None:
    tokens = [point.tokens for point in points]
    panel.plot(tokens, [getattr(point, name) for point in points], "o-", color=_COLOR)
    panel.set_title("held-out loss" if name == "loss" else name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [_short(count) for count in tokens])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(axis="y")
    panel.spines[["top", "right", "left"]].set_visible(False)


def _short(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
