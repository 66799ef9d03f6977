"""Checkpoints: a run goes on bit by bit, and incomplete or damaged checkpoints are not used."""

import shutil
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

SHORT: dict[str, Any] = {
    "steps": 4,
    "checkpoint": {"every": 2},
    "evaluation": {"num_prompts": 0},
}


def weights(settings: TrainSettings) -> dict[str, torch.Tensor]:
    return JakiroDrafter.from_pretrained(settings.run_folder / "drafter").state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_goes_on_bit_by_bit(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    kind = {"kind": optimizer}
    whole = tiny_run(workshop, **SHORT, optimizer=kind, run_folder=str(workshop / "whole"))
    train(whole)
    halved = tiny_run(workshop, **SHORT, optimizer=kind, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=2)
        with pytest.raises(PowerCutError):
            train(halved)
    assert not (halved.run_folder / "drafter").exists()
    with (halved.run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0.0}\n{"step": 4, "lo')  # lines of lost steps
    train(halved)
    assert curve(whole) == curve(halved)
    for name, part in weights(whole).items():
        assert torch.equal(part, weights(halved)[name]), name


def test_an_incomplete_checkpoint_is_never_used(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_run(workshop, **SHORT, run_folder=str(workshop / "whole"))
    train(whole)
    halved = tiny_run(workshop, **SHORT, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=2)
        with pytest.raises(PowerCutError):
            train(halved)
    good = halved.run_folder / "checkpoints" / "step-00000002"
    partial = good.with_name(".partial")
    shutil.copytree(good, partial)
    (partial / "state.json").unlink()
    train(halved)
    assert curve(whole) == curve(halved)


def test_a_damaged_checkpoint_is_reported(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run(workshop, **SHORT)
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=2)
        with pytest.raises(PowerCutError):
            train(settings)
    for path in (settings.run_folder / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot resume from .*step-00000002; .*remove that"):
        train(settings)


def test_only_the_latest_checkpoints_are_kept(workshop: Path) -> None:
    settings = tiny_run(workshop, **SHORT | {"steps": 3, "checkpoint": {"every": 1, "keep": 2}})
    train(settings)
    kept = sorted(path.name for path in (settings.run_folder / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]
