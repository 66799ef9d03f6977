"""A run checks that its drafter can be saved, loaded and used, and keeps the best."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import tiny_run

from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from training.distributed.checkpoint import RunState
from training.distributed.processes import join_processes, launch_environment
from training.evaluation.metrics import read_metrics
from training.loop.export import Exporter, check_untrained
from training.loop.run_folder import RunFolder
from training.setup.preparation import prepare
from training.train import train

DECODING = {"prompts": 2, "temperature": 0.0, "acceptance_by_depth": [0.5], "tokens": 9}


def test_a_drafter_that_cannot_be_saved_as_it_is_stops_the_run_before_its_first_step(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = JakiroDrafter.save_pretrained

    def save_another(self: JakiroDrafter, *args: Any, **options: Any) -> None:
        with torch.no_grad():
            next(self.parameters())[0] += 1
        save(self, *args, **options)
        with torch.no_grad():
            next(self.parameters())[0] -= 1

    monkeypatch.setattr(JakiroDrafter, "save_pretrained", save_another)
    settings = tiny_run(workshop)
    with pytest.raises(CheckpointError, match="self-test before the first step"):
        train(settings)
    assert read_metrics(settings.run_folder) == []
    assert not (settings.run_folder / ".self-test").exists()


def test_a_full_disk_is_noticed_before_the_first_step(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JakiroDrafter, "save_pretrained", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(tiny_run(workshop))


def test_the_self_test_changes_no_random_state_and_leaves_nothing(workshop: Path) -> None:
    with launch_environment("cpu"):
        inputs = prepare(tiny_run(workshop))
        with join_processes("cpu") as processes:
            drafter = inputs.build_drafter()
            torch.manual_seed(5)
            state = torch.get_rng_state()
            check_untrained(drafter, inputs, workshop, processes)
    assert torch.equal(torch.get_rng_state(), state)
    assert not (workshop / ".self-test").exists()


def test_a_drafter_that_does_not_decode_stops_the_run_before_its_first_step(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a shape that nobody thought of")

    monkeypatch.setattr(JakiroDrafter, "encode_memory", fail)
    settings = tiny_run(workshop)
    with pytest.raises(CheckpointError, match="a shape that nobody thought of"):
        train(settings)
    assert read_metrics(settings.run_folder) == []


@pytest.mark.parametrize(("keep_best", "expected"), [(True, [1.5, 1.5, 1.75]), (False, [None] * 3)])
def test_only_a_higher_tau_replaces_the_best_drafter(
    workshop: Path, keep_best: bool, expected: list[float | None]
) -> None:
    settings = tiny_run(workshop, checkpoint={"keep_best": keep_best})
    folder, state = RunFolder(settings.run_folder), RunState(step=1)
    found = []
    with launch_environment("cpu"):
        inputs = prepare(settings)
        drafter = inputs.build_drafter()
        with join_processes("cpu") as processes:
            exporter = Exporter(inputs, folder, processes)
            exporter.keep_if_best(drafter, {}, state)  # tau was not measured
            assert folder.best_tau is None
            for tau in (1.5, 1.25, 1.75):
                evaluation = {"decoding": [DECODING | {"tau": tau + gap} for gap in (-0.5, 0.5)]}
                exporter.keep_if_best(drafter, evaluation, state)
                found.append(folder.best_tau)
    assert found == expected
