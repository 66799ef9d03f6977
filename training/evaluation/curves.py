"""Runs as curves: loss, agreement, tau, and acceptance by depth, several runs in one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from inference.benchmark.report.canvas import any_character
from inference.benchmark.report.style import INK, THEME, Look, look, short_names
from jakiro.errors import ConfigError, DataError
from jakiro.utils.files import write_atomically
from training.evaluation.metrics import METRICS, read_evaluations, read_metrics

_LABEL_LIMIT = 60  # characters
_LEGEND_LINE, _SIZE = 0.22, (9.6, 6.4)  # inches
_MARKED: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.5}

Points = list[tuple[int, float]]  # step or depth, and the figure there


@dataclass(frozen=True)
class RunCurves:
    """What a run recorded, ready to be drawn: pairs of step, or of depth, and figure."""

    name: str
    loss: Points
    agreement: Points
    held_out_loss: Points
    held_out_agreement: Points
    tau: Points  # at the first temperature
    acceptance: Points  # by depth, in the last evaluation


def plot_runs(folders: Sequence[Path], out: Path) -> None:
    """Draw runs, also such as are still going on, into one PNG; a file that is there is replaced.

    Raises:
        ConfigError: the picture cannot be stored there.
        DataError: a folder holds no records of a run.
    """
    _require_storable(out)
    runs = [read_curves(folder) for folder in folders]
    labels = short_names([run.name for run in runs], _LABEL_LIMIT)
    looks = [look(labels[run.name], place) for place, run in enumerate(runs)]
    image = BytesIO()
    with style.context(THEME, after_reset=True), any_character():
        _draw(runs, looks).savefig(image, format="png")
    write_atomically(out, image.getvalue())


def read_curves(folder: Path) -> RunCurves:
    """Return the curves of a run's folder.

    Raises:
        DataError: it holds no records.
    """
    lines, evaluations = read_metrics(folder), read_evaluations(folder)
    if not lines:
        raise DataError(
            f"there are no records of a run in {folder}",
            expected=f"the run_folder of a training run, with {METRICS}",
            got="no such folder" if not folder.is_dir() else "a folder without them",
        )
    losses = [(line["step"], line) for line in lines if "loss" in line]
    held_out = [(step, one["held_out"]) for step, one in evaluations if "held_out" in one]
    decoded = [(step, one["decoding"][0]) for step, one in evaluations if "decoding" in one]
    last = decoded[-1][1]["acceptance_by_depth"] if decoded else []
    return RunCurves(
        name=str(folder),
        loss=[(step, one["loss"]) for step, one in losses],
        agreement=[(step, one["levels"][0]["agreement"]) for step, one in losses],
        held_out_loss=[(step, one["loss"]) for step, one in held_out],
        held_out_agreement=[(step, one["levels"][0]["agreement"]) for step, one in held_out],
        tau=[(step, one["tau"]) for step, one in decoded],
        acceptance=list(enumerate(last, start=1)),
    )


def _draw(runs: Sequence[RunCurves], looks: Sequence[Look]) -> Figure:
    width, height = _SIZE
    figure = Figure(figsize=(width, height + _LEGEND_LINE * len(runs)), dpi=160)
    figure.set_layout_engine("constrained")
    (loss, agreement), (tau, acceptance) = figure.subplots(2, 2)
    _panel(loss, "loss (dots: on held-out text)", "step")
    _panel(agreement, "agreement with the target on the next token", "step")
    _panel(tau, "tau: tokens per target forward", "step")
    _panel(acceptance, "acceptance by depth, last evaluation", "depth")
    for run, one in zip(runs, looks, strict=True):
        _line(loss, run.loss, one)
        _dots(loss, run.held_out_loss, one)
        _line(agreement, run.agreement, one)
        _dots(agreement, run.held_out_agreement, one)
        _dots(tau, run.tau, one)
        _dots(acceptance, run.acceptance, one)
    for axes, curves in ((tau, "tau"), (acceptance, "acceptance")):
        _say_if_empty(axes, [getattr(run, curves) for run in runs])
    handles = [loss.plot([], [], **_style(one), marker=one.marker)[0] for one in looks]
    labels = [one.label for one in looks]
    figure.legend(handles, labels, loc="outside lower left", frameon=False)
    return figure


def _panel(axes: Axes, title: str, label: str) -> None:
    axes.set(title=title, xlabel=label)
    axes.grid(visible=True, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _line(axes: Axes, points: Points, one: Look) -> None:
    axes.plot(*_columns(points), **_style(one), linewidth=1.0, alpha=0.75)


def _dots(axes: Axes, points: Points, one: Look) -> None:
    axes.plot(*_columns(points), **_style(one), **_MARKED, marker=one.marker)


def _say_if_empty(axes: Axes, several: Sequence[Points]) -> None:
    if not any(several):
        where: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "color": INK}
        axes.text(0.5, 0.5, "not measured", **where)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _style(one: Look) -> dict[str, Any]:
    return {"color": one.color, "linestyle": one.dash}


def _require_storable(out: Path) -> None:
    expected = {
        "a name that ends in .png": out.suffix == ".png",
        "a file in a folder that is there": out.absolute().parent.is_dir() and not out.is_dir(),
    }
    for what, is_so in expected.items():
        if not is_so:
            raise ConfigError(
                f"cannot store the picture in {out}",
                expected=what,
                got=out.name,
                remedy="choose another name for --out",
            )
