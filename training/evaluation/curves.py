"""Plot of the curves of several runs: loss, agreement, tau, and acceptance by depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from inference.benchmark.report.style import INK, THEME, Look, any_character, look, short_names
from jakiro.errors import ConfigError, ResourceError
from jakiro.utils.files import write_atomically
from jakiro.utils.wording import counted
from training.evaluation.metrics import metrics_of_run, read_evaluations

_LABEL_LIMIT = 60  # characters
_FEW = 3  # up to this number of evaluations, the title states it, because curves say little
_LEGEND_LINE, _SIZE = 0.22, (9.6, 6.4)  # inches
_MARKED: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.5}

Points = list[tuple[int, float]]  # pairs (step, value) or (depth, value)


@dataclass(frozen=True)
class RunCurves:
    """The curves of a run, as pairs (step, value), or (depth, value) for `acceptance`."""

    name: str
    loss: Points
    agreement: Points
    validation_loss: Points
    validation_agreement: Points
    tau: Points  # at the first temperature
    acceptance: Points  # in the last evaluation


def plot_runs(folders: Sequence[Path], out: Path) -> None:
    """Plot the curves of finished or running runs in one PNG file, which replaces an existing file.

    Args:
        folders: run folders.
        out: path of the PNG file.

    Raises:
        ConfigError: the picture cannot be stored at `out`.
        DataError: a folder contains no metrics of a run.
        ResourceError: the disk is full, or the folder of `out` is not writable.
    """
    _require_storable(out)
    runs = [read_curves(folder) for folder in folders]
    labels = short_names([run.name for run in runs], _LABEL_LIMIT)
    looks = [look(labels[run.name], index) for index, run in enumerate(runs)]
    image = BytesIO()
    with style.context(THEME, after_reset=True), any_character():
        _draw(runs, looks).savefig(image, format="png")
    try:
        write_atomically(out, image.getvalue())
    except OSError as error:
        raise ResourceError(
            f"cannot store the picture in {out}",
            expected="a writable folder and enough disk space",
            got=error.strerror or error,
            remedy="free disk space, or choose another name for --out",
        ) from error


def read_curves(folder: Path) -> RunCurves:
    """Return the curves of a run.

    Raises:
        DataError: the folder contains no metrics.
    """
    lines, evaluations = metrics_of_run(folder), read_evaluations(folder)
    losses = [(line["step"], line) for line in lines if "loss" in line]
    validation = [
        (step, found["validation"]) for step, found in evaluations if "validation" in found
    ]
    decoded = [(step, found["decoding"][0]) for step, found in evaluations if "decoding" in found]
    last = decoded[-1][1]["conditional_acceptance_rate"] if decoded else []
    return RunCurves(
        name=str(folder),
        loss=[(step, line["loss"]) for step, line in losses],
        agreement=[(step, line["levels"][0]["agreement"]) for step, line in losses],
        validation_loss=[(step, found["loss"]) for step, found in validation],
        validation_agreement=[
            (step, found["levels"][0]["agreement"]) for step, found in validation
        ],
        tau=[(step, found["tau"]) for step, found in decoded],
        acceptance=list(enumerate(last, start=1)),
    )


def _draw(runs: Sequence[RunCurves], looks: Sequence[Look]) -> Figure:
    width, height = _SIZE
    figure = Figure(figsize=(width, height + _LEGEND_LINE * len(runs)), dpi=160)
    figure.set_layout_engine("constrained")
    (loss, agreement), (tau, acceptance) = figure.subplots(2, 2)
    _panel(loss, "loss (dots: on validation data)", "step")
    _panel(agreement, "agreement with the target on the next token", "step")
    count = max((len(run.tau) for run in runs), default=0)
    few = f" ({counted(count, 'evaluation')})" if 0 < count <= _FEW else ""
    _panel(tau, f"tau: tokens per forward pass of the target{few}", "step")
    _panel(acceptance, "acceptance by depth, last evaluation", "depth")
    for run, run_look in zip(runs, looks, strict=True):
        _line(loss, run.loss, run_look)
        _dots(loss, run.validation_loss, run_look)
        _line(agreement, run.agreement, run_look)
        _dots(agreement, run.validation_agreement, run_look)
        _dots(tau, run.tau, run_look)
        _dots(acceptance, run.acceptance, run_look)
    agreement.set_ylim(bottom=0)
    tau.set_ylim(bottom=1)
    acceptance.set_ylim(bottom=0)
    for axes, curves in ((tau, "tau"), (acceptance, "acceptance")):
        _label_if_empty(axes, [getattr(run, curves) for run in runs])
    handles = [loss.plot([], [], **_style(each), marker=each.marker)[0] for each in looks]
    labels = [each.label for each in looks]
    figure.legend(handles, labels, loc="outside lower left", frameon=False)
    return figure


def _panel(axes: Axes, title: str, label: str) -> None:
    axes.set(title=title, xlabel=label)
    axes.grid(visible=True, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _line(axes: Axes, points: Points, run_look: Look) -> None:
    axes.plot(*_columns(points), **_style(run_look), linewidth=1.0, alpha=0.75)


def _dots(axes: Axes, points: Points, run_look: Look) -> None:
    axes.plot(*_columns(points), **_style(run_look), **_MARKED, marker=run_look.marker)


def _label_if_empty(axes: Axes, curves: Sequence[Points]) -> None:
    if not any(curves):
        options: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "color": INK}
        axes.text(0.5, 0.5, "not measured", **options)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _style(run_look: Look) -> dict[str, Any]:
    return {"color": run_look.color, "linestyle": run_look.dash}


def _require_storable(out: Path) -> None:
    expected = {
        "a name that ends in .png": out.suffix == ".png",
        "a file in an existing folder": out.absolute().parent.is_dir() and not out.is_dir(),
    }
    for condition, is_met in expected.items():
        if not is_met:
            raise ConfigError(
                f"cannot store the picture in {out}",
                expected=condition,
                got=out.name,
                remedy="choose another name for --out",
            )
