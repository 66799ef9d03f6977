"""`jakiro init` writes settings that `jakiro train` accepts, and never overwrites a file."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama
from typer.testing import CliRunner

from jakiro.cli import app
from jakiro.utils.settings import load_settings
from training.config import TrainSettings


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tiny_llama().save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    return "target"


def test_a_settings_file_is_written_and_the_next_commands_are_shown(target: str) -> None:
    result = CliRunner().invoke(app, ["init", target], catch_exceptions=False)
    assert "jakiro synthesize --target target" in result.output
    assert "jakiro train --config my.yaml" in result.output
    Path("my.yaml").write_text(Path("my.yaml").read_text().replace("epochs: 4", "steps: 4"))
    Path("target-chats.jsonl").touch()
    planned = CliRunner().invoke(app, ["train", "--config", "my.yaml", "--dry-run"])
    assert planned.exit_code == 0


def test_given_data_need_not_be_synthesized(target: str) -> None:
    words = ["init", target, "--data", "chats.jsonl", "--out", "my own.yaml"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "synthesize" not in result.output
    assert "warning: there is no file chats.jsonl yet" in result.output
    assert "jakiro verify --drafter runs/target/drafter" in result.output
    assert "jakiro train --config 'my own.yaml' --dry-run" in result.output
    assert 'paths: ["chats.jsonl"]' in Path("my own.yaml").read_text()


@pytest.mark.parametrize(("num_records", "held_out"), [(3, 0), (45, 4), (1000, 32)])
def test_few_conversations_are_held_out_of_few(
    target: str, num_records: int, held_out: int
) -> None:
    Path("chats.jsonl").write_text('{"text": "a"}\n' * num_records + "\n")
    CliRunner().invoke(app, ["init", target, "--data", "chats.jsonl"], catch_exceptions=False)
    assert load_settings(TrainSettings, Path("my.yaml")).data.validation_size == held_out
