"""`jakiro throughput` prints what it measures, and writes it to a new file."""

from pathlib import Path

import pytest
from helpers.commands import exit_code

from jakiro.utils.settings import dump_settings, validate_settings
from training.config import TrainSettings
from training.planning.throughput import Throughput


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of a file with the settings of a run."""
    target, texts, path = tmp_path / "target", tmp_path / "texts.jsonl", tmp_path / "run.yaml"
    target.mkdir()
    texts.touch()
    settings = {"target": {"name_or_path": str(target)}, "data": {"paths": [str(texts)]}}
    path.write_text(dump_settings(validate_settings(TrainSettings, settings, source="the test")))
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The seed and the number of steps of each measurement, none of which takes any time."""
    measured: list[tuple[int, int]] = []

    def measure(settings: TrainSettings, steps: int) -> Throughput:
        measured.append((settings.seed, steps))
        return Throughput(
            tokens_per_second=900.0,
            seconds_per_step=0.5,
            ideal_seconds_per_step=0.4,
            ratio=(0.8, 0.7, 0.9),
            goal=0.6,
            flop_use=0.25,
            parts={},
            peak_bytes=None,
            padding=0.05,
            products_per_second=1e9,
            environment={},
            settings={},
        )

    monkeypatch.setattr("training.planning.throughput.measure", measure)
    return measured


def test_measured_values_are_printed_and_written_to_a_new_file(
    config: str,
    calls: list[tuple[int, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["throughput", "--config", config, "--set", "seed=5", "--steps", "3"]
    out = tmp_path / "values.json"
    assert exit_code(*words, "--out", str(out)) == 0
    assert Throughput.model_validate_json(out.read_text()).tokens_per_second == 900
    assert "80.0% (70.0% to 90.0%) of the ideal run's speed" in capsys.readouterr().out
    assert exit_code(*words, "--out", str(out)) == 2  # before anything is measured
    assert calls == [(5, 3)]
    assert exit_code(*words) == 0


def test_values_among_other_lines_do_not_go_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("throughput", "--config", "base", "--out", "-") == 2
    assert "--out cannot write the measured values to standard output" in capsys.readouterr().err
