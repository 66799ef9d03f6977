"""Forest plot of a study: tau of every arm, divided by tau of the base, with intervals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from inference.benchmark.report.style import INK, OUTCOMES, POINTS, THEME
from training.studies.ablation.results import ArmRow, StudyResults

_PANEL_WIDTH, _NAME_WIDTH, _ROW_HEIGHT, _FRAME_HEIGHT = 4.4, 2.1, 0.36, 1.35  # inches


def plot(results: StudyResults, path: Path) -> None:
    """Write a forest plot of tau divided by tau of the base, as PNG.

    Args:
        results: results of a study; each pair of a temperature and a kind of trees gets a panel.
        path: path of the PNG.
    """
    panels = [(_title(rows[0]), _others(rows)) for rows in results.groups]
    num_rows = max(1, *(len(rows) for _, rows in panels))
    width = _NAME_WIDTH + _PANEL_WIDTH * len(panels)
    size = (width, _FRAME_HEIGHT + _ROW_HEIGHT * num_rows)
    with style.context(THEME, after_reset=True):
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
        for panel, (title, rows) in zip(axes, panels, strict=True):
            _paint(panel, title, rows)
        figure.supxlabel(_caption(results), fontsize=8.5)
        figure.savefig(path, format="png")


def _title(row: ArmRow) -> str:
    title = "greedy" if row.temperature == 0 else f"temperature {row.temperature:g}"
    return title if row.trees is None else f"{title}, trees {row.trees}"


def _others(rows: Sequence[ArmRow]) -> list[ArmRow]:
    return [row for row in rows if row.verdict != "base"]


def _paint(panel: Any, title: str, rows: list[ArmRow]) -> None:
    panel.set_title(title)
    panel.axvline(1.0, color=INK, linewidth=1.0)
    panel.grid(axis="x")
    for height, row in enumerate(rows):
        _paint_row(panel, height, row)
    panel.set_yticks(range(len(rows)), [row.arm for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)  # the first arm on top
    panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.spines[["top", "right", "left"]].set_visible(False)


def _paint_row(panel: Any, height: int, row: ArmRow) -> None:
    ratio, color = row.tau_ratio, OUTCOMES[row.verdict]
    panel.plot([ratio.low, ratio.high], [height, height], color=color, linewidth=2.4)
    panel.plot(ratio.value, height, "o", color=color, markersize=6.5)
    if len(ratio.by_seed) > 1:
        below = [height + 0.24] * len(ratio.by_seed)
        panel.plot(ratio.by_seed, below, "|", color=POINTS, markersize=4, alpha=0.6)
    label = f"{ratio.value:.3f}"
    weight = "normal" if row.verdict == "not resolved" else "bold"
    position = {"xy": (1.02, height), "xycoords": ("axes fraction", "data")}
    panel.annotate(label, **position, color=color, weight=weight, va="center")


def _caption(results: StudyResults) -> str:
    if results.seeds < 2:
        seeds = "one seed: intervals cover the spread over prompts, not over trainings"
    else:
        seeds = f"ticks: each of the {results.seeds} seeds"
    measured = f"tau divided by tau of the base, 95% interval over {results.prompts} prompts"
    return f"{measured}\n{seeds}"
