"""The runs of a study start like those of `jakiro train`."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import spaced_tokenizer

from jakiro.errors import EXIT_CODE_INTERRUPTED, JakiroError
from training.config import TrainSettings
from training.studies.ablation import runs
from training.studies.ablation.runs import ArmRun, train_runs


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
        train_runs([run], "deepspeed", tiny_llama(), spaced_tokenizer())
    (words,) = launched
    assert "--master_port" in words  # the default port may be in use
    assert "--world_info" in words
    assert words[-2:] == ["--config", str(run.settings.run_folder / "launch.yaml")]
