"""The runs of a study start like those of `jakiro train`."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError, JakiroError
from training.config import TrainSettings
from training.studies.ablation import runs
from training.studies.ablation.runs import ArmRun, forget, train_runs


@pytest.fixture
def run(tmp_path: Path) -> ArmRun:
    values = {"target": {"name_or_path": "x"}, "data": {"paths": ["x"]}, "run_folder": tmp_path}
    return ArmRun("base", 0, TrainSettings.model_validate(values))


@pytest.mark.parametrize(
    ("code", "error"), [(1, JakiroError), (EXIT_CODE_INTERRUPTED, KeyboardInterrupt)]
)
def test_a_failed_run_and_an_interrupted_one_end_the_study(
    run: ArmRun, monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    launched: list[Sequence[str]] = []

    def launch(words: Sequence[str], _settings: TrainSettings) -> int:
        launched.append(words)
        return code

    monkeypatch.setattr(runs, "launch", launch)
    with pytest.raises(error):
        train_runs([run], "deepspeed", None, None)  # type: ignore[arg-type]
    (words,) = launched
    assert "--master_port" in words  # the default port may be in use
    assert "--num_accelerators" in words
    assert words[-2:] == ["--config", str(run.settings.run_folder / "launch.yaml")]


def test_an_arm_that_is_forgotten_is_not_recalled_from_any_cell(tmp_path: Path) -> None:
    study = tmp_path / "study"
    names = ["base-0", "base-1", "base-2-0"]
    for folder in (study / "measurements", study / "code" / "measurements"):
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.inputs.json").touch()
    values = {"target": {"name_or_path": "x"}, "data": {"paths": ["x"]}}
    settings = TrainSettings.model_validate(values | {"run_folder": study / "runs" / "base"})
    (settings.run_folder / "drafter").mkdir(parents=True)
    (settings.run_folder / "best").symlink_to("drafter")
    (settings.run_folder / "run.json").touch()
    forget([ArmRun("base", 0, settings)], "base", study)
    assert [path.name for path in settings.run_folder.iterdir()] == [".lock"]
    left = sorted(path.name for path in study.rglob("*.inputs.json"))
    assert left == sorted(f"{name}.inputs.json" for name in names[1:] * 2)


def test_an_arm_that_another_process_trains_is_not_forgotten(tmp_path: Path) -> None:
    values = {"target": {"name_or_path": "x"}, "data": {"paths": ["x"]}}
    settings = TrainSettings.model_validate(values | {"run_folder": tmp_path / "base"})
    run = ArmRun("base", 0, settings)
    with run.folder.claim(settings, {}):
        with pytest.raises(ConfigError, match="another process is training"):
            forget([run], "base", tmp_path)
        assert (settings.run_folder / "run.json").exists()
    forget([run], "base", tmp_path)
    assert not (settings.run_folder / "run.json").exists()
