"""The curves of finished and unfinished runs are plotted in one picture."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from inference.benchmark.report.style import Look
from jakiro.cli import main
from training.evaluation.curves import _draw, plot_runs, read_curves


def _run(folder: Path, *, is_evaluated: bool = True, tau: float = 1.5) -> Path:
    """Write a run's metrics as training writes them, and return the folder of the run."""
    folder.mkdir()
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 5.0 / step, "levels": [{"agreement": 0.1 * step}]}
        for step in range(1, 5)
    ]
    found = {
        "validation": {"loss": 2.0, "levels": [{"agreement": 0.25}]},
        "decoding": [{"tau": tau, "conditional_acceptance_rate": [0.5, 0.25]}],
    }
    if is_evaluated:
        lines += [{"step": step, "evaluation": found} for step in (0, 4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 5, "lo')  # an unfinished line
    return folder


def _code(*words: str) -> object:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    return exit_.value.code or 0


def test_curves_have_the_values_of_the_metrics(tmp_path: Path) -> None:
    curves = read_curves(_run(tmp_path / "run"))
    assert curves.loss[0] == (1, 5.0)
    assert curves.agreement[-1] == (4, pytest.approx(0.4))
    assert curves.validation_loss == [(0, 2.0), (4, 2.0)]
    assert curves.validation_agreement == [(0, 0.25), (4, 0.25)]
    assert curves.tau == [(0, 1.5), (4, 1.5)]
    assert curves.acceptance == [(1, 0.5), (2, 0.25)]


def test_the_command_draws_several_runs_into_one_png(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / "a"),
        _run(tmp_path / "b$x$", is_evaluated=False),
        _run(tmp_path / "c", tau=2.0),
    ]
    out = tmp_path / "curves.png"
    assert _code("plot", *map(str, runs), "--out", str(out)) == 0
    height, width, _ = imread(out).shape
    assert width > 1000
    assert height > 700
    first = out.read_bytes()
    plot_runs(runs[:1], out)  # replaces the picture
    assert out.read_bytes() != first


def test_runs_without_an_evaluation_are_plotted_too(tmp_path: Path) -> None:
    plot_runs([_run(tmp_path / "a", is_evaluated=False)], tmp_path / "curves.png")
    assert imread(tmp_path / "curves.png").size


def test_a_full_disk_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.evaluation.curves.write_atomically", fail)
    out = tmp_path / "curves.png"
    assert _code("plot", str(_run(tmp_path / "run")), "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert f"cannot store the picture in {out}" in error
    assert "got: No space left on device; remedy: " in error


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        ("missing", "curves.png", "no metrics of a run in"),
        ("empty", "curves.png", "got: a folder without metrics"),
        ("run", "curves.pdf", "expected: a name that ends in .png"),
        ("run", "none/curves.png", "expected: a file in an existing folder"),
    ],
)
def test_a_plot_that_is_impossible_is_refused_in_one_line(
    tmp_path: Path, run: str, out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    _run(tmp_path / "run")
    assert _code("plot", str(tmp_path / run), "--out", str(tmp_path / out)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / out).exists()


def test_axes_begin_at_the_smallest_possible_value(tmp_path: Path) -> None:
    run = read_curves(_run(tmp_path / "run"))
    figure = _draw([run], [Look("run", "black")])
    bottoms = {
        axes.get_title().split(" ")[0].rstrip(":"): axes.get_ylim()[0] for axes in figure.axes
    }
    assert (bottoms["tau"], bottoms["acceptance"], bottoms["agreement"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, " (1 evaluation)"), (2, " (2 evaluations)"), (3, " (3 evaluations)"), (4, ""), (0, "")],
)
def test_a_title_says_if_there_are_few_evaluations(
    tmp_path: Path, count: int, expected: str
) -> None:
    run = replace(read_curves(_run(tmp_path / "run")), tau=[(step, 1.5) for step in range(count)])
    figure = _draw([run], [Look("run", "black")])
    titles = [axes.get_title() for axes in figure.axes]
    assert f"tau: tokens per forward pass of the target{expected}" in titles
