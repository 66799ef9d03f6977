"""The program that measures training runs, and its parts are the parts of a step."""

import json
from pathlib import Path

import pytest
from helpers.training import tiny_run

from jakiro.settings import dump_settings
from training.bench.throughput import main


@pytest.fixture
def config(workshop: Path) -> Path:
    file = workshop / "run.yaml"
    file.write_text(dump_settings(tiny_run(workshop, batch={"rows": 4, "micro_batch": 2})))
    return file


def test_a_run_is_measured_beside_its_parts(
    config: Path, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = workshop / "throughput.json"
    assert main(["--config", str(config), "--steps", "3", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert list(found["parts"]) == ["target", "memory", "trunk", "bank", "head"]
    assert all(part["flops"] > 0 and part["seconds"] > 0 for part in found["parts"].values())
    total = 2 * sum(part["seconds"] for part in found["parts"].values())  # two micro-batches
    assert found["ideal_seconds_per_step"] == pytest.approx(total, rel=0.5)
    assert found["ratio"][1] <= found["ratio"][0] <= found["ratio"][2]
    assert 0 <= found["padding"] < 1
    assert not (workshop / "run").exists()
    assert "of the ideal run's speed" in capsys.readouterr().out
    assert main(["--config", str(config), "--out", str(out)]) == 2


@pytest.mark.parametrize("kind", ["hybrid", "feedback"])
def test_drafters_that_read_features_are_measured_in_parts(
    config: Path, workshop: Path, kind: str
) -> None:
    out = workshop / "throughput.json"
    words = ["--config", str(config), "--set", f"drafter.trunk.kind={kind}", "--steps", "2"]
    assert main([*words, "--out", str(out)]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert all(part["flops"] > 0 for name, part in parts.items() if name != "memory")
    assert (parts["memory"]["flops"] > 0) == (kind == "hybrid")  # the last feature as it is


def test_parts_that_depend_on_each_other_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "drafter.trunk.kind=feedback", "--set", "drafter.trunk.rollout_steps=2"]
    assert main(["--config", str(config), *words]) == 2
    assert "cannot be timed alone" in capsys.readouterr().err
