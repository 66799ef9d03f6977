"""Runs check that their drafter can be saved, loaded and used, and keep the best drafter."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import read_evaluations, tiny_run
from safetensors.torch import load_file

from jakiro.drafter import JakiroDrafter
from training.config import TrainSettings
from training.train import train

DECODING = {
    "tau": 1.5,
    "prompts": 2,
    "temperature": 0.0,
    "conditional_acceptance_rate": [0.5],
    "tokens": 9,
}


AGREEMENT = "training.evaluation.evaluate.Evaluation.measure"
EVERY_STEP: dict[str, Any] = {"every": 1, "num_prompts": 0}


def _measure(monkeypatch: pytest.MonkeyPatch, *agreements: float) -> None:
    """Make evaluations report these agreements with the target, one after the other."""
    values = iter(agreements)

    def measure(*_: Any) -> dict[str, Any]:
        agreement = next(values)
        return {
            "validation": {"levels": [{"agreement": agreement}], "positions": 9},
            "decoding": [DECODING | {"tau": 1 + agreement}],
        }

    monkeypatch.setattr(AGREEMENT, measure)


def _finished_step(settings: TrainSettings) -> int:
    """Return the number of optimizer steps of the finished drafter."""
    record = JakiroDrafter.from_pretrained(settings.run_folder / "drafter").config.record
    assert record is not None
    return int(record["training"]["step"])


@pytest.mark.parametrize(
    ("agreements", "checkpoint", "expected"),
    [
        ((0.3, 0.2, 0.1, 0.25), {}, 0),
        ((0.3, 0.4, 0.1, 0.25), {}, 1),
        ((0.3, 0.2, 0.1, 0.35), {}, 3),
        ((0.3, 0.2, 0.1, 0.3), {}, 0),
        ((0.3, 0.2, 0.1, 0.25), {"finish_with_best": False}, 3),
        ((0.3, 0.2, 0.1, 0.25), {"keep_best": False}, 3),
    ],
)
def test_a_run_ends_with_the_drafter_of_the_highest_held_out_agreement(
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    agreements: tuple[float, ...],
    checkpoint: dict[str, Any],
    expected: int,
) -> None:
    _measure(monkeypatch, *agreements)
    settings = tiny_run(workshop, steps=3, evaluation=EVERY_STEP, checkpoint=checkpoint)
    with caplog.at_level("INFO"):
        train(settings)
    assert _finished_step(settings) == expected
    last = caplog.records[-1].message
    assert f"after 3 steps{': ' if expected < 3 else ' ('}held-out agreement" in last
    if expected < 3:
        best = f"the best drafter of the run, after {expected} steps (held-out agreement"
        tau = f"tau {1 + agreements[expected]:.2f} at temperature 0"
        assert f"{best} {agreements[expected]:.1%}, {tau}; the last" in last
        kept = (settings.run_folder / "best" / "model.safetensors").read_bytes()
        assert (settings.run_folder / "drafter" / "model.safetensors").read_bytes() == kept


def test_a_drafter_that_gets_worse_ends_as_good_as_it_began(workshop: Path) -> None:
    spoilt: dict[str, Any] = {"learning_rate": 3.0, "warmup_steps": 0}
    settings = tiny_run(workshop, steps=4, evaluation=EVERY_STEP, optimizer=spoilt)
    train(settings)
    found = [line for _, line in read_evaluations(settings.run_folder)]
    agreements = [line["validation"]["levels"][0]["agreement"] for line in found]
    assert len(agreements) == 5
    record = JakiroDrafter.from_pretrained(settings.run_folder / "drafter").config.record
    assert record is not None
    assert record["evaluation"]["validation"]["levels"][0]["agreement"] == max(agreements)


@pytest.mark.parametrize(
    ("patience", "expected"), [(1, [0, 1, 2]), (2, [0, 1, 2, 3, 4, 5]), (None, [*range(8)])]
)
def test_a_run_ends_early_after_evaluations_without_improvement(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, patience: int | None, expected: list[int]
) -> None:
    _measure(monkeypatch, 0.1, 0.2, 0.2, 0.3, 0.1, 0.2, 0.4, 0.1)
    evaluation = EVERY_STEP | {"patience": patience}
    settings = tiny_run(workshop, steps=7, evaluation=evaluation, checkpoint={"every": 1})
    train(settings)
    found = read_evaluations(settings.run_folder)
    assert [step for step, _ in found] == expected


def test_a_run_that_ends_early_with_adapters_keeps_those_of_its_best_drafter(
    trained_workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = shutil.copytree(trained_workshop / "run" / "drafter", trained_workshop / "start")
    _measure(monkeypatch, 0.1, 0.4, 0.3, 0.2)
    settings = tiny_run(
        trained_workshop,
        steps=3,
        evaluation=EVERY_STEP,
        lora={"rank": 2},
        initialize={"drafter": str(start)},
        run_folder=str(trained_workshop / "adapted"),
    )
    folder = train(settings)
    assert _finished_step(settings) == 1
    adapters = load_file(folder.parent / "adapter" / "adapter_model.safetensors")
    kept = load_file(folder.parent / "best" / "adapter" / "adapter_model.safetensors")
    assert not (folder / "adapter").exists()
    assert adapters.keys() == kept.keys()
    assert all(torch.equal(part, kept[name]) for name, part in adapters.items())


def test_prompts_that_are_decoded_do_not_change_the_saved_weights(workshop: Path) -> None:
    saved = []
    for num_prompts in (0, 1):
        settings = tiny_run(
            workshop,
            steps=2,
            target={"dtype": "bf16"},
            evaluation={"num_prompts": num_prompts},
            run_folder=str(workshop / f"run-{num_prompts}"),
        )
        saved.append(load_file(train(settings) / "model.safetensors"))
    assert {weight.dtype for weight in saved[1].values()} == {torch.float32}
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())
