"""Runs resume bit by bit from checkpoints, and do not use incomplete or damaged ones."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.training import curve, tiny_run

from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from training.config import TrainSettings
from training.distributed.checkpoint import RunState
from training.train import train

# A run that tests interrupt after its first checkpoint.
RUN: dict[str, Any] = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluation": {"num_prompts": 0},
}


def weights(settings: TrainSettings) -> dict[str, torch.Tensor]:
    return JakiroDrafter.from_pretrained(settings.run_folder / "drafter").state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_goes_on_bit_by_bit(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    changes = RUN | {"optimizer": {"kind": optimizer}}
    whole = tiny_run(workshop, **changes, run_folder=str(workshop / "whole"))
    train(whole)
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
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_run(workshop, **RUN, run_folder=str(workshop / "whole"))
    train(whole)
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
    with pytest.raises(CheckpointError, match=r"cannot resume from .*step-00000003; .*remove that"):
        train(settings)


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
    assert (state.best_value, state.best_step, state.num_without_gain) == (0.3, 2, 1)
    state.step = 6
    assert state.add_score("agreement", 0.4)
    assert (state.best_value, state.best_step, state.num_without_gain) == (0.4, 6, 0)
    state.step = 8
    assert state.add_score("tau", 0.1)  # a different quantity, not comparable with 0.4


def test_evaluations_that_a_resumed_run_repeats_do_not_count_as_without_gain() -> None:
    kept = RunState(step=10, best_metric="agreement", best_value=0.4, best_step=10)
    state = RunState(step=5, best_metric="agreement", best_value=0.3, best_step=0)
    state.num_without_gain = 1
    state.add_kept(asdict(kept))
    for step, count in ((8, 0), (10, 0), (12, 1)):
        state.step = step
        assert not state.add_score("agreement", 0.4 if step == 10 else 0.2)
        assert state.num_without_gain == count
    state.add_kept(asdict(RunState(best_metric="agreement", best_value=0.1, best_step=0)))
    state.add_kept(None)
    assert (state.best_value, state.best_step) == (0.4, 10)
