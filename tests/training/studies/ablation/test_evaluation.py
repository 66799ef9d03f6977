"""Stored measurements are reused, and the best value of a swept setting is selected."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.comparisons import make_document

from inference.benchmark.document import ComparisonDocument
from training.config import TrainSettings
from training.studies.ablation.evaluation import Measurement, select_value
from training.studies.ablation.runs import ArmRun, MeasuredRun
from training.studies.ablation.sweep import Sweep
from training.studies.ablation.trees import parse_trees


def _document(taus: dict[str, Sequence[float]]) -> ComparisonDocument:
    document = make_document(list(taus), (0.0, 1.0))
    methods = tuple(
        method.model_copy(update={"tau": taus[method.name][[0.0, 1.0].index(method.temperature)]})
        for method in document.methods
    )
    return document.model_copy(update={"methods": methods})


def test_the_highest_geometric_mean_wins_and_the_smallest_of_equals() -> None:
    sweep = Sweep(key="any", values=(0.4, 0.1, 0.2))
    found = select_value("arm", sweep, _document({"0.4": (4, 1), "0.1": (2, 2), "0.2": (1, 4)}))
    assert found.tau == ((4, 2, 1), (1, 2, 4))
    assert found.score == pytest.approx((2, 2, 2))
    assert found.chosen == 0.1
    uneven = select_value("arm", sweep, _document({"0.4": (3, 1), "0.1": (1, 1), "0.2": (2, 2)}))
    assert uneven.chosen == 0.2


def test_an_interrupted_measurement_is_not_taken_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"target": {"name_or_path": "x"}, "data": {"paths": ["x"]}}
    settings = TrainSettings.model_validate(values | {"run_folder": tmp_path / "run"})
    measured = MeasuredRun(weights="w", facts={}, record={})
    runs = [ArmRun("base", 0, settings, measured=measured)]
    (tmp_path / "prompts.jsonl").touch()
    is_interrupted = False
    commands = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        path = Path(command[command.index("--json") + 1])
        document = _document({"base": (2, 1)})
        path.write_text(document.model_copy(update={"is_complete": False}).model_dump_json())
        if is_interrupted:
            raise KeyboardInterrupt
        path.write_text(document.model_dump_json())
        return subprocess.CompletedProcess(command, 0)

    def measure(num_prompts: int) -> ComparisonDocument:
        return Measurement(
            prompts=tmp_path / "prompts.jsonl",
            num_prompts=num_prompts,
            max_new_tokens=4,
            temperatures=(0.0,),
            trees=parse_trees((), 4),
            repeats=1,
            folder=tmp_path / "measurements",
            facts={"base": {}},
        ).of_seed(runs)

    monkeypatch.setattr(subprocess, "run", run)
    assert measure(40) == measure(40)
    assert len(commands) == 1
    is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        measure(80)
    is_interrupted = False
    assert measure(40).is_complete
    assert len(commands) == 3
