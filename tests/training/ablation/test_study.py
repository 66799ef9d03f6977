"""A study as a user runs it: one command, a table, and a folder in which it continues."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code
from helpers.training import tiny_run

from inference.benchmark.document import read_document
from jakiro.utils.settings import dump_settings
from training.ablation.analysis import StudyResults
from training.ablation.settings import StudySettings
from training.ablation.study import Study

ABLATIONS = Path(__file__).parents[3] / "configs" / "ablations"
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


@pytest.mark.parametrize(
    ("seeds", "arms"),
    [
        pytest.param(1, SQUARE[:1], id="one seed"),
        pytest.param(2, SQUARE, marks=pytest.mark.slow, id="two seeds, experts x contrastive loss"),
    ],
)
@pytest.mark.timeout(180)  # a measurement starts another process
def test_a_study_trains_measures_and_continues_where_it_stopped(
    command: list[str],
    workshop: Path,
    seeds: int,
    arms: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = workshop / "study"
    words = [*command, *_configs(*arms), "--seeds", str(seeds)]
    assert exit_code("ablate", *words) == 0
    printed = capsys.readouterr()
    assert "experts-1: " in printed.err
    assert "instead of 64" in printed.err
    assert "experts-1" in printed.out  # the terminal wraps longer names

    results = StudyResults.model_validate_json((out / "results.json").read_text())
    assert results.seeds == seeds
    assert [row.arm for row in results.rows if not row.temperature] == ["base", *arms]
    assert [interaction.temperature for interaction in results.interactions] == (
        [0.0, 1.0] if arms == SQUARE else []
    )
    assert "experts-1" in (out / "results.txt").read_text()
    assert json.loads((out / "study.json").read_text())["settings"]["seeds"] == seeds
    document = read_document(out / "measurements" / f"seed-{seeds - 1}.json")
    assert {method.name for method in document.methods} == {"autoregressive", "base", *arms}

    weights = _modified(out, "drafter/*.safetensors")
    measured = _modified(out / "measurements", "*.json")
    assert len(weights) == (1 + len(arms)) * seeds
    assert exit_code("ablate", *words) == 0
    assert _modified(out, "drafter/*.safetensors") == weights
    assert _modified(out / "measurements", "*.json") == measured

    shutil.rmtree(out / "runs" / "experts-1")
    assert exit_code("ablate", *words) == 0
    again = _modified(out, "drafter/*.safetensors")
    changed = {path for path in again if again[path] != weights[path]}
    assert len(changed) == seeds
    assert all("/experts-1/" in path for path in changed)
    # The weights are the same, so nothing is measured again.
    assert _modified(out / "measurements", "*.json") == measured


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
    assert exit_code("ablate", *words, "--trees", "candidates=5") == 0
    assert _modified(workshop / "study" / "measurements", "*.json") != measured


def test_a_dry_run_writes_nothing(
    command: list[str], workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("ablate", *command, *_configs("experts-1"), "--dry-run") == 0
    assert "training 2 arms with 3 seeds takes at least" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not (workshop / "study").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--train-only", "other"], "there is no arm other"),
        (["--set", "data.validation_size=0"], "too few prompts to measure on"),
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


@pytest.mark.slow
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
