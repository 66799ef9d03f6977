"""Imported drafters are written in full or not at all, with settings to train them further."""

import json
import shlex
from pathlib import Path

import pytest
from helpers.imports import converted
from helpers.models import tiny_llama
from helpers.published import eagle_config, eagle_weights, save_published

from jakiro.drafter import JakiroDrafter
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.writing import (
    SETTINGS_FILE,
    record_of,
    serve_commands,
    write_import,
)
from jakiro.utils.settings import load_settings
from training.config import TrainSettings

TARGET, FOLDER = "/models/the target's", 'exported/my "drafter"'


@pytest.fixture
def drafter(tmp_path: Path) -> JakiroDrafter:
    folder = save_published(tmp_path / "head", eagle_weights(), eagle_config())
    drafter = converted(folder, tiny_llama())
    drafter.config.record = record_of(plan_import(read_checkpoint(folder)), {"agreement": 0.5})
    return drafter


def test_a_written_drafter_has_its_record_and_settings(
    drafter: JakiroDrafter, tmp_path: Path
) -> None:
    write_import(drafter, tmp_path / "drafter")
    loaded = JakiroDrafter.from_pretrained(tmp_path / "drafter")
    assert loaded.config.record == drafter.config.record
    assert loaded.config.record["import"]["measured"] == {"agreement": 0.5}
    file = tmp_path / "drafter" / SETTINGS_FILE
    settings = load_settings(TrainSettings, file, ["data.paths=[any.jsonl]"])
    assert settings.drafter == loaded.config.settings
    assert settings.initialize.drafter == str(tmp_path / "drafter")


def test_an_existing_folder_is_never_replaced(drafter: JakiroDrafter, tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        write_import(drafter, tmp_path / "drafter")
    assert [path.name for path in (tmp_path / "drafter").iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "head"]


@pytest.mark.parametrize("layout", ["eagle3", "vllm"])
def test_quotes_and_spaces_in_paths_are_kept(layout: str) -> None:
    words = shlex.split(serve_commands(layout, FOLDER, TARGET, 4)["vLLM"])
    assert words[:4] == ["vllm", "serve", TARGET, "--speculative-config"]
    options = {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 4}
    assert json.loads(words[4]) == options


def test_sglang_serves_only_the_layout_of_eagle3() -> None:
    words = shlex.split(serve_commands("eagle3", FOLDER, TARGET, 4)["SGLang"])
    assert words[words.index("--model-path") + 1] == TARGET
    assert words[words.index("--speculative-draft-model-path") + 1] == FOLDER
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"
    for layout in ("speculators", "vllm"):
        assert "SGLang" not in serve_commands(layout, FOLDER, TARGET, 4)
