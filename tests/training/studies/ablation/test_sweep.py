"""Sweeps train each value of a setting once, and select one for each arm on dev prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.training import TEXTS, tiny_run, write_jsonl

from inference.benchmark.document import read_document
from jakiro.errors import ConfigError
from jakiro.utils.settings import dump_settings
from training.studies.ablation.arms import Arm, SizedArm
from training.studies.ablation.results import StudyResults
from training.studies.ablation.sweep import parse_sweep, value_name

ABLATIONS = Path(__file__).parents[4] / "configs" / "ablations"
RATES = "optimizer.learning_rate=0.01,0.02,0.04"


@pytest.fixture
def command(workshop: Path) -> list[str]:
    """Return the command-line arguments of a small study with a sweep."""
    settings = tiny_run(workshop, steps=2, drafter={"experts": {"intermediate_size": 64}})
    (workshop / "base.yaml").write_text(dump_settings(settings))
    write_jsonl(workshop / "dev.jsonl", ({"prompt": text[:12]} for text in TEXTS[:3]))
    write_jsonl(workshop / "test.jsonl", ({"prompt": text[4:16]} for text in TEXTS[3:]))
    return [
        *("--base", str(workshop / "base.yaml"), "--out", str(workshop / "study")),
        *("--config", str(ABLATIONS / "contrast-loss-off.yaml"), "--seeds", "2"),
        *("--max-new-tokens", "6", "--num-prompts", "3", "--dev-num-prompts", "2"),
        *("--prompts", str(workshop / "test.jsonl"), "--dev-prompts", str(workshop / "dev.jsonl")),
        *("--sweep", RATES),
    ]


@pytest.fixture
def sized(workshop: Path) -> Callable[..., SizedArm]:
    """Return a function that makes an arm with changed settings."""

    def make(name: str = "base", **changes: object) -> SizedArm:
        return SizedArm(Arm(name, tiny_run(workshop, **changes)), 1, 32)

    return make


def _modified(folder: Path, pattern: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob(pattern))}


def _trained(folder: Path) -> set[str]:
    drafters = (folder / "runs").glob("**/drafter")
    return {str(drafter.parent.relative_to(folder / "runs")) for drafter in drafters}


@pytest.mark.slow
def test_a_sweep_of_one_seed_trains_each_value_once_and_is_reported(
    command: list[str], workshop: Path
) -> None:
    out = workshop / "study"
    words = [*command, "--seeds", "1", "--sweep", "optimizer.learning_rate=0.01,0.04"]
    assert exit_code("ablate", *words) == 0
    sweep = StudyResults.model_validate_json((out / "results.json").read_text()).sweep
    assert sweep is not None
    assert [swept.arm for swept in sweep.arms] == ["base", "contrast-loss-off"]
    values = {f"{swept.arm}/{value}/seed-0" for swept in sweep.arms for value in ("0.01", "0.04")}
    assert _trained(out) == values
    assert "selected for each arm on 2 dev prompts" in (out / "results.md").read_text()

    measured = _modified(out / "measurements", "*.json")
    before = _modified(out, "drafter/*.safetensors")
    more = [*command, "--sweep", "optimizer.learning_rate=0.01,0.04", "--train-only", "base"]
    assert exit_code("ablate", *more) == 0  # with a second seed
    after = _modified(out, "drafter/*.safetensors")
    chosen = value_name(sweep.value_of("base"))
    assert _trained(out) == values | {f"base/{chosen}/seed-1"}
    assert before.items() <= after.items()
    assert _modified(out / "measurements", "*.json") == measured


@pytest.mark.slow
def test_a_sweep_trains_each_value_once_and_goes_on_with_the_best_of_each_arm(
    command: list[str], workshop: Path
) -> None:
    out = workshop / "study"
    assert exit_code("ablate", *command) == 0
    results = StudyResults.model_validate_json((out / "results.json").read_text())
    sweep = results.sweep
    assert sweep is not None
    assert (sweep.key, sweep.values) == ("optimizer.learning_rate", (0.01, 0.02, 0.04))
    assert (sweep.temperatures, sweep.prompts) == ((0.0, 1.0), 2)
    expected = set()
    for swept in sweep.arms:
        assert swept.chosen in sweep.values
        assert [len(taus) for taus in swept.tau] == [3, 3]
        expected |= {f"{swept.arm}/{value_name(value)}/seed-0" for value in sweep.values}
        last = f"{swept.arm}/{value_name(swept.chosen)}/seed-1"
        expected |= {last}
        config = json.loads((out / "runs" / last / "drafter" / "config.json").read_text())
        settings = config["record"]["settings"]
        assert settings["optimizer"]["learning_rate"] == swept.chosen
    assert [swept.arm for swept in sweep.arms] == ["base", "contrast-loss-off"]
    assert _trained(out) == expected
    assert "selected for each arm on 2 dev prompts" in (out / "results.md").read_text()

    dev, test = (
        {sample.prompt for method in read_document(path).methods for sample in method.samples}
        for path in (out / "measurements/dev/base-seed-0.json", out / "measurements/seed-0.json")
    )
    assert (len(dev), len(test)) == (2, 3)
    assert dev.isdisjoint(test)

    trained, measured = (
        _modified(out, "drafter/*.safetensors"),
        _modified(out / "measurements", "*.json"),
    )
    assert exit_code("ablate", *command) == 0
    assert _modified(out, "drafter/*.safetensors") == trained
    assert _modified(out / "measurements", "*.json") == measured


@pytest.mark.slow
def test_processes_can_share_the_arms_of_a_study(command: list[str], workshop: Path) -> None:
    out = workshop / "study"
    assert exit_code("ablate", *command, "--train-only", "contrast-loss-off") == 0
    assert {run.partition("/")[0] for run in _trained(out)} == {"contrast-loss-off"}
    assert len(_trained(out)) == 4
    assert {path.name for path in (out / "measurements").rglob("*.json")} == {
        "contrast-loss-off-seed-0.json",
        "contrast-loss-off-seed-0.inputs.json",
    }
    assert not (out / "results.json").exists()
    before = _modified(out, "drafter/*.safetensors")
    assert exit_code("ablate", *command, "--train-only", "base") == 0
    assert exit_code("ablate", *command) == 0
    after = _modified(out, "drafter/*.safetensors")
    assert len(after) == 8
    assert before.items() <= after.items()


@pytest.mark.slow
def test_arms_are_trained_alone_without_a_sweep_too(command: list[str], workshop: Path) -> None:
    words = command[: command.index("--dev-num-prompts")]
    assert exit_code("ablate", *words, "--seeds", "1", "--train-only", "base") == 0
    assert _trained(workshop / "study") == {"base/seed-0"}
    assert not (workshop / "study" / "measurements").exists()


@pytest.mark.slow
def test_training_an_arm_again_trains_all_its_values_again(
    command: list[str], workshop: Path
) -> None:
    assert exit_code("ablate", *command, "--train-only", "base") == 0
    before = _modified(workshop / "study", "drafter/*.safetensors")
    assert exit_code("ablate", *command, "--train-only", "base", "--rerun", "base") == 0
    after = _modified(workshop / "study", "drafter/*.safetensors")
    assert after.keys() == before.keys()
    assert all(after[path] != before[path] for path in after)


def test_a_dry_run_counts_the_sweep(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("ablate", *command, "--dry-run") == 0
    assert "contrast-loss-off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sweep", "optimizer.learning_rates=1,2"], "one of optimizer.learning_rate"),
        (["--sweep", "optimizer.kind=1,2"], "one of optimizer.learning_rate"),
        (["--sweep", "objective.contrast_weight=0.1,0.2"], "one of optimizer.learning_rate"),
        (["--sweep", "batch.anchor_samples=1,2"], "one of optimizer.learning_rate"),
        (["--sweep", "steps=1,2"], "one of optimizer.learning_rate"),
        (["--set", "minutes=5", "--sweep", "minutes=1,2"], "one of optimizer.learning_rate"),
        (["--sweep", "optimizer.learning_rate=0.1"], "two or more different numbers"),
        (["--sweep", "optimizer.learning_rate=0.1,0.10"], "two or more different numbers"),
        (["--sweep", "optimizer.learning_rate=0.1,high"], "two or more different numbers"),
        (["--sweep", "optimizer.learning_rate=0.1,-1"], "greater than 0"),
        (["--sweep", "optimizer.warmup_steps=1,1.5"], "valid integer"),
        (["--dev-prompts", "test.jsonl"], "test.jsonl contains test prompts"),
        (["--train-only", "other"], "no such arm to train"),
    ],
)
def test_an_impossible_sweep_is_refused_before_anything_is_trained(
    command: list[str],
    workshop: Path,
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(workshop)
    assert exit_code("ablate", *command, *words) == 2
    assert expected in capsys.readouterr().err
    assert not (workshop / "study" / "runs").exists()


@pytest.mark.parametrize("missing", ["--sweep", "--dev-prompts"])
def test_a_sweep_and_dev_prompts_need_each_other(
    command: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = command.index(missing)
    assert exit_code("ablate", *command[:index], *command[index + 2 :]) == 2
    assert "--sweep and --dev-prompts must be set together" in capsys.readouterr().err


def test_dev_prompts_are_compared_as_the_target_reads_them(
    command: list[str], workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(workshop / "dev.jsonl", [{"prompt": TEXTS[4][4:16], "category": "other"}])
    assert exit_code("ablate", *command) == 2
    assert "1 of 1 dev prompts are test prompts" in capsys.readouterr().err


def test_whole_numbers_stay_whole_and_every_arm_must_take_every_value(
    sized: Callable[..., SizedArm],
) -> None:
    arm = sized()
    sweep = parse_sweep("optimizer.warmup_steps=1,2", [arm])
    changed = sweep.applied(arm, 2.0).arm.settings
    assert changed.optimizer.warmup_steps == 2
    assert changed.model_copy(update={"optimizer": arm.arm.settings.optimizer}) == arm.arm.settings
    with pytest.raises(ConfigError, match="warmup_steps"):
        parse_sweep("optimizer.warmup_steps=1,9", [arm, sized("short", steps=5)])


@pytest.mark.parametrize(
    ("value", "name"),
    [(0.02, "0.02"), (1e-5, "1e-05"), (10.0, "10"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_a_value_has_the_shortest_name_that_means_it(value: float, name: str) -> None:
    assert value_name(value) == name
    assert float(name) == value
