"""A study as a user runs it: one command, a table, and a folder in which it continues."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code
from helpers.training import tiny_run

from inference.benchmark.document import read_document
from jakiro.utils.settings import dump_settings
from training.config import TrainSettings
from training.studies.ablation.results import StudyResults
from training.studies.ablation.settings import StudySettings
from training.studies.ablation.study import Study
from training.train import train

ABLATIONS = Path(__file__).parents[4] / "configs" / "ablations"
SQUARE = ("experts-1", "contrast-loss-off", "experts-1-contrast-loss-off")


@pytest.fixture
def command(workshop: Path) -> list[str]:
    """Return the command-line arguments of a small study."""
    settings = tiny_run(workshop, steps=4, drafter={"experts": {"intermediate_size": 64}})
    (workshop / "base.yaml").write_text(dump_settings(settings))
    return [
        *("--base", str(workshop / "base.yaml"), "--out", str(workshop / "study")),
        *("--max-steps", "2", "--max-new-tokens", "6", "--num-prompts", "2"),
    ]


def _configs(*names: str) -> list[str]:
    return [word for name in names for word in ("--config", str(ABLATIONS / f"{name}.yaml"))]


def _study(workshop: Path, config: Path, **changes: Any) -> Study:
    folders = {"base": workshop / "base.yaml", "out": workshop / "study"}
    return Study(StudySettings(config=(config,), **folders, **changes))


def _modified(folder: Path, pattern: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob(pattern))}


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_study_trains_measures_and_continues_where_it_stopped(
    command: list[str], workshop: Path, seeds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = workshop / "study"
    words = [*command, *_configs(*SQUARE), "--seeds", str(seeds)]
    assert exit_code("ablate", *words) == 0
    printed = capsys.readouterr()
    assert "experts-1: " in printed.err
    assert "instead of 64" in printed.err
    assert "experts-1" in printed.out  # the terminal wraps longer names

    results = StudyResults.model_validate_json((out / "results.json").read_text())
    assert results.seeds == seeds
    assert [row.arm for row in results.at(0.0)] == ["base", *SQUARE]
    assert [interaction.temperature for interaction in results.interactions] == [0.0, 1.0]
    tokens = {tokens for row in results.rows for tokens in row.training_tokens}
    assert len({row.training_tokens for row in results.rows}) == 1
    assert min(tokens) > 0
    assert [found.arm for found in results.experts] == ["base", *SQUARE]
    assert [found.top_overlap is None for found in results.experts] == [False, True, False, True]
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
    assert "experts-1" in (out / "results.md").read_text()
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "study.json").read_text())["settings"]["seeds"] == seeds
    document = read_document(out / "measurements" / f"seed-{seeds - 1}.json")
    assert {method.name for method in document.methods} == {"autoregressive", "base", *SQUARE}
    assert document.figures("base", 0.0).tree == document.figures("experts-1", 0.0).tree

    weights = _modified(out, "drafter/*.safetensors")
    measured = _modified(out / "measurements", "*.json")
    assert len(weights) == 4 * seeds
    assert exit_code("ablate", *words) == 0
    assert _modified(out, "drafter/*.safetensors") == weights
    assert _modified(out / "measurements", "*.json") == measured

    assert exit_code("ablate", *words, "--rerun", "experts-1") == 0
    again = _modified(out, "drafter/*.safetensors")
    changed = {path for path in again if again[path] != weights[path]}
    assert len(changed) == seeds
    assert all("/experts-1/" in path for path in changed)
    # The weights are the same, so nothing is measured again.
    assert _modified(out / "measurements", "*.json") == measured


@pytest.mark.slow
def test_cells_share_trainings_and_arms_are_measured_one_by_one(
    command: list[str], workshop: Path
) -> None:
    out, prompts = workshop / "study", workshop / "own.jsonl"
    words = [*command, *_configs("contrast-loss-off"), "--seeds", "1", "--separately"]
    weights = None
    for cell in ("first", "second"):
        prompts.write_text("".join(json.dumps({"prompt": cell + end}) + "\n" for end in "ab"))
        assert exit_code("ablate", *words, "--cell", cell, "--prompts", str(prompts)) == 0
        names = sorted(path.name for path in (out / cell / "measurements").glob("*.json"))
        assert names == [
            f"{arm}-0{end}.json" for arm in ("base", "contrast-loss-off") for end in (".inputs", "")
        ]
        for arm in ("base", "contrast-loss-off"):
            text = (out / cell / "arms" / f"{arm}.json").read_text()
            found = StudyResults.model_validate_json(text)
            assert {row.arm for row in found.rows} == {arm}
            assert [row.temperature for row in found.rows] == [0.0, 1.0]
            assert found.rows[0].seconds_per_draft is not None
            assert found.experts[0].router_entropy > 0
        weights = weights or _modified(out, "drafter/*.safetensors")
        assert _modified(out, "drafter/*.safetensors") == weights
    assert (
        exit_code(
            "ablate", *words, "--cell", "second", "--prompts", str(prompts), "--rerun", "base"
        )
        == 0
    )
    again = _modified(out, "drafter/*.safetensors")
    assert [path.split("/")[-4] for path in again if again[path] != weights[path]] == ["base"]
    (out / "second" / "measurements" / "base-0.json").unlink()
    kept = _modified(out / "second" / "measurements", "contrast*.json")
    assert exit_code("ablate", *words, "--cell", "second", "--prompts", str(prompts)) == 0
    assert _modified(out / "second" / "measurements", "contrast*.json") == kept


@pytest.mark.slow
def test_arms_are_measured_when_they_are_trained_and_stay_known_without_their_drafters(
    command: list[str],
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, trained = workshop / "study", []

    def stopping_train(settings: TrainSettings, **inputs: Any) -> Path:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(settings)
        return train(settings, **inputs)

    monkeypatch.setattr("training.studies.ablation.runs.train", stopping_train)
    words = [*command, *_configs(*SQUARE[:2]), "--seeds", "1", "--separately", "--cell", "own"]
    assert exit_code("ablate", *words) == 130
    printed = capsys.readouterr().err
    assert "to continue the study" in printed
    assert "experts-1 at T = 0: tau " in printed
    results = StudyResults.model_validate_json((out / "own" / "results.json").read_text())
    assert [row.arm for row in results.at(0.0)] == ["base", "experts-1"]

    # On another machine, only the stored results are there, and a setting is new.
    inputs = out / "own" / "measurements" / "experts-1-0.inputs.json"
    stored = json.loads(inputs.read_text())
    del stored["runs"]["experts-1"]["record"]["settings"]["objective"]["accepted_length_children"]
    inputs.write_text(json.dumps(stored))
    monkeypatch.undo()
    shutil.rmtree(out / "runs")
    measured = _modified(out / "own" / "measurements", "*.json")
    assert len(measured) == 4
    assert exit_code("ablate", *words) == 0
    assert sorted(path.name for path in (out / "runs").iterdir()) == [SQUARE[1]]
    assert _modified(out / "own" / "measurements", "*.json").items() > measured.items()
    again = StudyResults.model_validate_json((out / "own" / "results.json").read_text())
    assert [row.arm for row in again.at(0.0)] == ["base", *SQUARE[:2]]
    assert again.at(0.0)[:2] == results.at(0.0)
    assert again.experts[:2] == results.experts

    shutil.rmtree(out / "runs")
    assert exit_code("ablate", *words, "--set", "optimizer.learning_rate=0.1") == 2
    assert "optimizer.learning_rate differs" in capsys.readouterr().err
    assert not (out / "runs").exists()
    (out / "own" / "measurements" / "base-0.json").unlink()
    assert exit_code("ablate", *words) == 0
    assert [path.name for path in (out / "runs").iterdir()] == ["base"]


@pytest.mark.slow
def test_other_prompts_are_measured_again(command: list[str], workshop: Path) -> None:
    prompts = workshop / "own.jsonl"
    words = [*command, *_configs("contrast-loss-off"), "--seeds", "1", "--prompts", str(prompts)]
    seen = []
    for text in ("def add", "total ="):
        prompts.write_text("".join(json.dumps({"prompt": text + end}) + "\n" for end in "ab"))
        assert exit_code("ablate", *words) == 0
        document = read_document(workshop / "study" / "measurements" / "seed-0.json")
        seen.append({sample.prompt for sample in document.methods[0].samples})
    assert seen[0].isdisjoint(seen[1])
    measured = _modified(workshop / "study" / "measurements", "*.json")
    assert exit_code("ablate", *words, "--candidates", "5") == 0
    assert _modified(workshop / "study" / "measurements", "*.json") != measured


@pytest.mark.slow
def test_every_arm_is_measured_with_every_kind_of_trees(command: list[str], workshop: Path) -> None:
    out, prompts = workshop / "study", workshop / "own.jsonl"
    words = [*command, *_configs("contrast-loss-off"), "--seeds", "1", "--prompts", str(prompts)]
    prompts.write_text("".join(json.dumps({"prompt": "def " + end}) + "\n" for end in "abcdefg"))
    kinds = {"deterministic-60": "tree=deterministic,candidates=60", "8": "candidates=8"}
    assert (
        exit_code(
            "ablate", *words, *(word for kind in kinds.values() for word in ("--trees", kind))
        )
        == 0
    )
    results = StudyResults.model_validate_json((out / "results.json").read_text())
    assert results.prompts == 2
    assert results.trees == list(kinds)
    document = read_document(out / "measurements" / "seed-0.json")
    figures = document.figures("contrast-loss-off@deterministic-60", 1.0)
    assert figures.tree is not None
    assert (figures.tree.sampled, figures.tree.num_nodes) == (False, 60)
    assert document.figures("base@8", 1.0).tree.sampled
    assert "| deterministic-60 |" in (out / "results.md").read_text()


@pytest.mark.slow
def test_runs_of_another_study_are_not_mistaken_for_runs_of_this_study(
    command: list[str], workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, *_configs("contrast-loss-off"), "--seeds", "1"]
    assert exit_code("ablate", *words) == 0
    trained = _modified(workshop / "study", "*.safetensors")
    assert exit_code("ablate", *words, "--set", "optimizer.learning_rate=0.1") == 2
    assert "optimizer.learning_rate differs" in capsys.readouterr().err
    assert _modified(workshop / "study", "*.safetensors") == trained


def test_a_dry_run_shows_its_progress_and_its_estimate_and_writes_nothing(
    command: list[str],
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("jakiro.utils.progress.INTERVAL", 0.0)
    words = [*_configs("experts-1"), "--num-prompts", "40", "--repeats", "2"]
    assert exit_code("ablate", *command, *words, "--dry-run") == 0
    printed = capsys.readouterr()
    assert "experts-1" in printed.out
    assert "autoregressive" in printed.out
    assert not (workshop / "study").exists()
    positions = [
        printed.err.index("INFO timing decoding and an optimizer step of each of 2 arms"),
        *(printed.err.index(f"Timing a step of each arm: {count} of 2,") for count in (1, 2)),
    ]
    assert positions == sorted(positions)
    assert (
        "training: 3 seeds; measuring, of every arm and seed: 40 prompts x 6 tokens x "
        "2 temperatures x 2 repeats x 1 kind of trees"
    ) in " ".join(printed.out.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rerun", "other"], "no such arm to run again"),
        (["--rerun", "base", "--train-only", "contrast-loss-off"], "not among those to be trained"),
        (["--rerun", "base", "--dry-run"], "--dry-run cannot be combined with --rerun"),
        (["--set", "data.validation_size=0"], "too few prompts to measure on"),
        (["--prompts", "nowhere.jsonl"], "there is no file"),
        (["--seeds", "0"], "seeds"),
        (["--trees", "candidates=none"], "candidates=N with N from 1"),
        (["--set", "drafter.experts.intermediate_size=1"], "cannot be made as large"),
    ],
)
def test_an_impossible_study_is_refused_before_anything_is_trained(
    command: list[str],
    workshop: Path,
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = ["experts-4"] if "intermediate_size" in words[-1] else ["contrast-loss-off"]
    assert exit_code("ablate", *command, *_configs(*configs), *words) == 2
    assert expected in capsys.readouterr().err
    assert not (workshop / "study" / "runs").exists()


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ("drafter: {draft_vocab_size: 301}", "larger than the target's vocabulary"),
        (
            "drafter: {tail_layers: 3, experts: {combine: sum}, schedule: {parallel_levels: 0}}",
            "tail",
        ),
        ("initialize: {attention_layer: 9}", "a layer that the target does not have"),
    ],
)
def test_an_arm_that_cannot_be_trained_is_refused_before_any_training(
    command: list[str],
    workshop: Path,
    delta: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workshop / "delta.yaml").write_text(delta)
    assert exit_code("ablate", *command, "--config", str(workshop / "delta.yaml")) == 2
    assert expected in capsys.readouterr().err
    assert not (workshop / "study" / "runs").exists()


def test_an_arm_that_starts_with_a_drafter_can_be_continued(
    command: list[str], workshop: Path
) -> None:
    assert (
        exit_code("ablate", *command, *_configs("contrast-loss-off"), "--train-only", "base") == 0
    )
    start = workshop / "study" / "runs" / "base" / "seed-0" / "drafter"
    delta = {"initialize": {"drafter": str(start)}, "objective": {"token_weight": 0.5}}
    (workshop / "warm.yaml").write_text(json.dumps(delta))
    words = [*command, "--config", str(workshop / "warm.yaml"), "--seeds", "1"]
    for _ in range(2):
        assert exit_code("ablate", *words, "--train-only", "warm") == 0
    study = _study(workshop, workshop / "warm.yaml", max_steps=2)
    assert "start_fingerprint" not in study.facts["base"]
    assert "start_fingerprint" in study.facts["warm"]


def test_prompts_are_those_of_held_out_conversations_unless_the_study_names_others(
    workshop: Path,
) -> None:
    (workshop / "prompts.jsonl").write_text('{"prompt": "def one"}\n')
    changes: dict[str, Any] = {"drafter": {"experts": {"intermediate_size": 64}}}
    changes["evaluation"] = {"prompts": str(workshop / "prompts.jsonl")}
    (workshop / "base.yaml").write_text(dump_settings(tiny_run(workshop, **changes)))
    study = _study(workshop, ABLATIONS / "contrast-loss-off.yaml", num_prompts=2)
    assert len(study.inputs.prompts) == 2
    assert "def one" not in study.inputs.prompts


@pytest.mark.slow
def test_arms_are_trained_through_the_launcher(command: list[str], workshop: Path) -> None:
    words = [*command, *_configs("contrast-loss-off"), "--seeds", "1", "--launcher", "deepspeed"]
    assert exit_code("ablate", *words) == 0
    drafters = list((workshop / "study" / "runs").glob("*/seed-0/drafter/config.json"))
    assert len(drafters) == 2
