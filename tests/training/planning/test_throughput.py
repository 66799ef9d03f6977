"""A run's throughput is measured together with that of its parts."""

from pathlib import Path

import pytest
import torch
from helpers.target_states import offline_run, write_target_states
from helpers.training import tiny_run

from jakiro.errors import ConfigError
from training import module
from training.planning.speed import seconds_per_step
from training.planning.throughput import measure, summary
from training.setup.preparation import prepare

PARTS = ["target", "memory", "trunk", "experts", "head"]


@pytest.mark.parametrize("kind", ["moa", "hybrid"])
def test_a_run_is_measured_beside_its_parts(kind: str, workshop: Path) -> None:
    found = measure(tiny_run(workshop, drafter={"trunk": {"kind": kind}}), steps=3)
    assert list(found.parts) == PARTS
    assert all(part.flops > 0 and part.seconds > 0 for part in found.parts.values())
    total = 2 * sum(part.seconds for part in found.parts.values())  # two micro-batches
    assert found.ideal_seconds_per_step == pytest.approx(total, rel=0.5)
    value, low, high = found.ratio
    assert low <= value <= high
    assert 0 <= found.padding < 1
    assert not (workshop / "run").exists()
    assert [line.split()[0] for line in summary(found)[:-2]] == [*PARTS, "step"]


def test_states_on_disk_are_read_as_in_training(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = offline_run(workshop)
    write_target_states(settings)
    target_runs = []
    monkeypatch.setattr(module, "look_at_target", lambda *_: target_runs.append(1))
    assert measure(settings, steps=1).parts["target"].seconds > 0
    assert seconds_per_step(prepare(settings), torch.device("cpu")) > 0
    assert not target_runs


def test_a_step_is_estimated_before_states_are_written(workshop: Path) -> None:
    assert seconds_per_step(prepare(offline_run(workshop)), torch.device("cpu")) > 0


def test_adapters_are_measured(trained_workshop: Path) -> None:
    start = {"initialize": {"drafter": str(trained_workshop / "run" / "drafter")}}
    settings = tiny_run(trained_workshop, lora={"rank": 2, "alpha": 4}, **start)
    found, of_all_weights = (
        measure(own, steps=1).parts
        for own in (settings, settings.model_copy(update={"lora": None}))
    )
    assert 0 < found["trunk"].flops < of_all_weights["trunk"].flops  # only adapters are trained
    assert seconds_per_step(prepare(settings), torch.device("cpu")) > 0


def test_tail_layers_are_refused(workshop: Path) -> None:
    drafter = {"tail_layers": 1, "experts": {"combine": "sum"}, "schedule": {"parallel_levels": 0}}
    with pytest.raises(ConfigError, match="cannot be timed separately"):
        measure(tiny_run(workshop, drafter=drafter), steps=1)
