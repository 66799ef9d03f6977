"""Stored measurements are reused, unless they were interrupted."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.comparisons import make_document

from inference.benchmark.document import ComparisonDocument
from training.config import TrainSettings
from training.studies.ablation.evaluation import measure
from training.studies.ablation.runs import ArmRun
from training.studies.ablation.settings import StudySettings


def test_an_interrupted_measurement_is_not_taken_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"target": {"name_or_path": "x"}, "data": {"paths": ["x"]}}
    settings = TrainSettings.model_validate(values | {"run_folder": tmp_path / "run"})
    runs = [ArmRun("base", 0, settings)]
    prompts, weights = tmp_path / "prompts.jsonl", runs[0].folder.drafter / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    prompts.touch()
    is_interrupted = False
    commands = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        path = Path(command[command.index("--json") + 1])
        document = make_document(["base"], (0.0,))
        path.write_text(document.model_copy(update={"is_complete": False}).model_dump_json())
        if is_interrupted:
            raise KeyboardInterrupt
        path.write_text(document.model_dump_json())
        return subprocess.CompletedProcess(command, 0)

    def measured(num_prompts: int) -> ComparisonDocument:
        study = StudySettings(
            base=tmp_path, config=(tmp_path,), out=tmp_path, num_prompts=num_prompts
        )
        return measure(runs, study, prompts, tmp_path / "measurements")

    monkeypatch.setattr(subprocess, "run", run)
    assert measured(40) == measured(40)
    assert len(commands) == 1
    is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        measured(80)
    is_interrupted = False
    assert measured(40).is_complete
    assert len(commands) == 3
    weights.write_bytes(b"trained again")
    measured(40)
    assert len(commands) == 4
