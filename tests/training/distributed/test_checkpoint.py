"""Runs resume from checkpoints with the same result, and reject incomplete or damaged ones."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.training import curve, tiny_run

from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from training.config import TrainSettings
from training.train import train

# A run that tests interrupt after its first checkpoint.
RUN: dict[str, Any] = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluation": {"num_prompts": 0},
}


def weights(settings: TrainSettings) -> dict[str, torch.Tensor]:
    return JakiroDrafter.from_pretrained(settings.run_folder / "drafter").state_dict()


@pytest.fixture(scope="module")
def finished(
    _workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], TrainSettings]:
    """A function that returns the settings of a finished, uninterrupted run with an optimizer."""

    @cache
    def run(optimizer: str) -> TrainSettings:
        folder = shutil.copytree(_workshop, tmp_path_factory.mktemp("whole") / "workshop")
        settings = tiny_run(folder, **RUN, optimizer={"kind": optimizer})
        train(settings)
        return settings

    return run


@pytest.fixture
def whole(finished: Callable[[str], TrainSettings]) -> TrainSettings:
    return finished("adamw")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_goes_on_bit_by_bit(
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: Callable[[str], TrainSettings],
    optimizer: str,
) -> None:
    changes = RUN | {"optimizer": {"kind": optimizer}}
    whole = finished(optimizer)
    halved = tiny_run(workshop, **changes, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=3)
        with pytest.raises(PowerCutError):
            train(halved)
    assert not (halved.run_folder / "drafter").exists()
    with (halved.run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')  # lines of steps that are lost
    train(halved)
    assert curve(whole) == curve(halved)
    for name, part in weights(whole).items():
        assert torch.equal(part, weights(halved)[name]), name


def test_an_incomplete_checkpoint_is_never_used(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, whole: TrainSettings
) -> None:
    halved = tiny_run(workshop, **RUN, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=3)
        with pytest.raises(PowerCutError):
            train(halved)
    good = halved.run_folder / "checkpoints" / "step-00000003"
    partial = good.with_name(".partial")
    shutil.copytree(good, partial)
    (partial / "state.json").unlink()
    train(halved)
    assert curve(whole) == curve(halved)


def test_a_damaged_checkpoint_is_reported(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run(workshop, **RUN)
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=3)
        with pytest.raises(PowerCutError):
            train(settings)
    for path in (settings.run_folder / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot resume from .*step-00000003; .*remedy: "):
        train(settings)
    assert not (settings.run_folder / "drafter").exists()


def _state(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda checkpoint: _state(checkpoint, step=99999), "the step: 99999 instead of 4"),
        (lambda checkpoint: _state(checkpoint, step="abc"), "step.*valid integer"),
        (lambda checkpoint: (checkpoint / "exp_avg.safetensors").unlink(), "the kinds of states"),
        (lambda checkpoint: (checkpoint / "state.json").write_text("{"), "JSONDecodeError"),
    ],
)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    whole: TrainSettings,
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    changes = RUN | {"checkpoint": {"every": 2}}
    halved = tiny_run(workshop, **changes, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=4)
        with pytest.raises(PowerCutError):
            train(halved)
    checkpoints = halved.run_folder / "checkpoints"
    damage(checkpoints / "step-00000004")
    train(halved)
    assert re.search(message + ".* the run resumes from .*step-00000002 instead", caplog.text)
    assert curve(whole) == curve(halved)
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == ["damaged-step-00000004", "step-00000004", "step-00000006"]


def test_only_the_latest_checkpoints_are_kept(workshop: Path) -> None:
    settings = tiny_run(workshop, **RUN | {"checkpoint": {"every": 1, "keep": 2}})
    train(settings)
    kept = sorted(path.name for path in (settings.run_folder / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006"]
