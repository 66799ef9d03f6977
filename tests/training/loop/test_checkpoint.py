"""Runs resume from checkpoints with the same result, and reject incomplete or damaged ones."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
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
from training.loop.checkpoint import Checkpoints, RunState
from training.processes import Processes
from training.train import train

# A run that tests interrupt after its first checkpoint.
RUN: dict[str, Any] = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluation": {"num_prompts": 0},
}
ALONE = Processes(0, 1, torch.device("cpu"))


def weights(settings: TrainSettings) -> dict[str, torch.Tensor]:
    return JakiroDrafter.from_pretrained(settings.run_folder / "drafter").state_dict()


def _interrupt(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=step)
        with pytest.raises(PowerCutError):
            train(settings)


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


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_bit_by_bit(
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: Callable[[str], TrainSettings],
    optimizer: str,
) -> None:
    changes = RUN | {"optimizer": {"kind": optimizer}}
    whole = finished(optimizer)
    halved = tiny_run(workshop, **changes, run_folder=str(workshop / "halved"))
    _interrupt(halved, monkeypatch, step=3)
    assert not (halved.run_folder / "drafter").exists()
    good = halved.run_folder / "checkpoints" / "step-00000003"
    (shutil.copytree(good, good.with_name(".partial")) / "state.json").unlink()  # never used
    with (halved.run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')  # lines of steps that are lost
    train(halved)
    assert curve(whole) == curve(halved)
    for name, part in weights(whole).items():
        assert torch.equal(part, weights(halved)[name]), name


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_that_is_removed(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, finished: Callable[[str], TrainSettings]
) -> None:
    settings = tiny_run(workshop, **RUN | {"checkpoint": {"every": 2}})
    _interrupt(settings, monkeypatch, step=4)
    checkpoints = settings.run_folder / "checkpoints"
    for path in (checkpoints / "step-00000004").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"from .*step-00000004; .*the checkpoint before it"):
        train(settings)
    assert not (settings.run_folder / "drafter").exists()
    shutil.rmtree(checkpoints / "step-00000004")
    assert Checkpoints(checkpoints, 2, ALONE).latest() == checkpoints / "step-00000002"
    train(settings)
    assert curve(settings) == curve(finished("adamw"))


def test_only_the_latest_checkpoints_are_kept(workshop: Path) -> None:
    settings = tiny_run(workshop, **RUN | {"checkpoint": {"every": 1, "keep": 2}})
    train(settings)
    kept = sorted(path.name for path in (settings.run_folder / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006"]


def test_the_best_evaluation_is_kept_in_the_state_of_a_run() -> None:
    state = RunState(step=2)
    assert state.add_score("agreement", 0.3)
    state.step = 4
    assert not state.add_score("agreement", 0.3)
    assert (state.best_value, state.best_step) == (0.3, 2)
    state.step = 6
    assert state.add_score("agreement", 0.4)
    assert (state.best_value, state.best_step) == (0.4, 6)
    state.step = 8
    assert state.add_score("tau", 0.1)  # another quantity, with which 0.4 cannot be compared


def test_the_best_evaluation_may_be_newer_than_the_checkpoint() -> None:
    kept = RunState(step=10, best_metric="agreement", best_value=0.4, best_step=10)
    state = RunState(step=5, best_metric="agreement", best_value=0.3, best_step=0)
    state.add_kept(asdict(kept))
    assert not state.add_score("agreement", 0.4)
    state.add_kept(asdict(RunState(best_metric="agreement", best_value=0.1, best_step=0)))
    state.add_kept(None)
    assert (state.best_value, state.best_step) == (0.4, 10)
