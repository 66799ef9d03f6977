"""The demo as a user runs it: it trains, decodes and writes results, and then uses its cache."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import exit_code

from jakiro.demo.presets import PRESETS, Preset

RESULT_KEYS = {
    "method",
    "temperature",
    "tau",
    "tokens_per_second",
    "speedup",
    "speedup_over_autoregressive",
    "identical_to_target",
}


def _tiny_preset() -> Preset:
    """Return the preset `smoke` with a tiny target, few texts and few training steps."""
    smoke = PRESETS["smoke"]
    target = {"vocab_size": 512, "num_layers": 2, "num_steps": 20, "num_validation_sequences": 4}
    shorter = {"max_training_characters": 100_000, "warmup_steps": 5}
    texts = {"num_files": 3, "batch": 4, "new_tokens": 64}
    changes = {
        "target": smoke.target.model_copy(update=target | shorter),
        "texts": smoke.texts.model_copy(update=texts),
        "drafter": smoke.drafter.model_copy(update={"steps": 12, "batch_size": 2}),
    }
    prompts = {"num_tree_prompts": 1, "num_prompts": 2, "max_new_tokens": 16}
    return smoke.model_copy(update=changes | prompts)


def _words(folder: Path) -> list[str]:
    words = ["demo", "--preset", "smoke", "--cache-dir", str(folder)]
    return [*words, "--json", str(folder / "figures.json")]


def _figures(folder: Path) -> dict[str, object]:
    """Return the figures, and remove their file, because the next demo needs a new one."""
    file = folder / "figures.json"
    document: dict[str, object] = json.loads(file.read_text())
    file.unlink()
    return document


@pytest.mark.slow
def test_the_smoke_demo_trains_decodes_and_reports_and_then_uses_its_cache(tmp_path: Path) -> None:
    def demo() -> dict[str, object]:
        program = Path(sys.executable).with_name("jakiro")
        subprocess.run([program, *_words(tmp_path)], capture_output=True, text=True, check=True)
        return _figures(tmp_path)

    assert_demo_trains_and_then_uses_its_cache(tmp_path, demo)


def test_a_tiny_demo_trains_decodes_and_reports_and_then_uses_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "smoke", _tiny_preset())

    def demo() -> dict[str, object]:
        assert exit_code(*_words(tmp_path)) == 0
        return _figures(tmp_path)

    assert_demo_trains_and_then_uses_its_cache(tmp_path, demo)


def assert_demo_trains_and_then_uses_its_cache(
    folder: Path, demo: Callable[[], dict[str, object]]
) -> None:
    """Run a demo twice with the same cache folder, and check its results."""
    first = demo()
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

    weights = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    second = demo()
    assert second["drafter"] == first["drafter"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == weights


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_prompts_and_continuations_fit_into_the_context_of_the_toy_target(preset: object) -> None:
    recipe = preset.target  # type: ignore[attr-defined]
    assert 96 + preset.max_new_tokens <= recipe.max_position  # type: ignore[attr-defined]
