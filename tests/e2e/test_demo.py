"""The demo as a user runs it: one command, figures, one line of JSON, and a cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jakiro.cli import main
from jakiro.demo.presets import PRESETS

RESULT_KEYS = {
    "method",
    "temperature",
    "tau",
    "tokens_per_second",
    "speedup",
    "speedup_over_autoregressive",
    "identical_to_target",
}


def _demo(folder: Path) -> dict[str, object]:
    program = Path(sys.executable).with_name("jakiro")
    command = [program, "demo", "--preset", "smoke", "--cache-dir", folder]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return document


def test_the_smoke_demo_trains_decodes_and_reports_and_then_uses_its_cache(tmp_path: Path) -> None:
    first = _demo(tmp_path)
    results = first["results"]
    assert isinstance(results, list)
    assert {row["method"] for row in results} == {
        "transformers",
        "transformers-lookup",
        "autoregressive",
        "jakiro",
    }
    for row in results:
        assert row.keys() >= RESULT_KEYS
        assert row["identical_to_target"] is (True if row["temperature"] == 0 else None)
    drafted = [row["tau"] for row in results if row["method"] == "jakiro"]
    assert min(drafted) > 1.0

    weights = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    second = _demo(tmp_path)
    assert second["drafter"] == first["drafter"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == weights


def test_an_unwritable_cache_folder_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--cache-dir", str(tmp_path / "file" / "cache")])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot write into the folder")


def test_a_target_that_does_not_exist_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--target", str(tmp_path / "nowhere"), "--cache-dir", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "error: cannot load the target" in capsys.readouterr().err


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_prompts_and_continuations_fit_into_the_embedded_target(preset: object) -> None:
    recipe = preset.target  # type: ignore[attr-defined]
    assert 96 + preset.max_new_tokens <= recipe.max_position  # type: ignore[attr-defined]


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--device", "cuda", "--cache-dir", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "error: there is no GPU" in capsys.readouterr().err
