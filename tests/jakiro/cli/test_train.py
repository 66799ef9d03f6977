"""`jakiro init` writes settings, and `jakiro train` estimates a run, and launches it."""

import os
from pathlib import Path

import pytest
import torch
from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, tiny_run, write_jsonl

from jakiro.drafter import JakiroDrafter
from jakiro.utils.settings import dump_settings, load_settings
from training.config import TrainSettings

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A settings file for a run of two steps."""
    tiny_llama(vocab=300, eos_token_id=0).save_pretrained(tmp_path / "target")
    tiny_tokenizer(texts=TEXTS).save_pretrained(tmp_path / "target")
    write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))
    changes = {
        "steps": 2,
        "engine": {"device": "cpu"},
        "evaluation": {"num_prompts": 1, "max_new_tokens": 2},
    }
    file = tmp_path / "run.yaml"
    file.write_text(dump_settings(tiny_run(tmp_path, **changes)))
    return file


def run(*words: object) -> int:
    """Run the command line in this process and return its exit code."""
    return exit_code("train", *words)


def test_init_writes_a_settings_file_and_shows_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    assert exit_code("init", "target") == 0
    printed = capsys.readouterr().out
    assert "jakiro synthesize --target target" in printed
    assert "jakiro train --config my.yaml" in printed
    Path("my.yaml").write_text(Path("my.yaml").read_text().replace("epochs: 4", "steps: 4"))
    Path("target-chats.jsonl").touch()
    assert run("--config", "my.yaml", "--dry-run") == 0
    capsys.readouterr()
    given = ["--data", "chats.jsonl", "--out"]
    assert exit_code("init", "target", *given, "my own.yaml") == 0
    captured = capsys.readouterr()
    assert "synthesize" not in captured.out
    assert "warning: there is no file chats.jsonl yet" in captured.err
    assert "jakiro verify --drafter runs/target/drafter" in captured.out
    assert "jakiro train --config 'my own.yaml' --dry-run" in captured.out
    assert 'paths: ["chats.jsonl"]' in Path("my own.yaml").read_text()
    for num_records, held_out in ((3, 0), (45, 4), (1000, 32)):
        Path("chats.jsonl").write_text('{"text": "a"}\n' * num_records + "\n")
        out = Path(f"{num_records}.yaml")
        assert exit_code("init", "target", *given, out) == 0
        assert load_settings(TrainSettings, out).data.validation_size == held_out


def test_a_dry_run_needs_no_weights_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "target" / "model.safetensors").unlink()
    before = sorted(config.parent.rglob("*"))
    words = ["--config", str(config), "--dry-run", "--processes", "2", "--device-memory", "80"]
    assert run(*words) == 0
    captured = capsys.readouterr()
    printed = captured.out
    for name in ("optimizer states", "activations", "states and cache", "disk", "TFLOP"):
        assert name in printed
    assert "80.0 GiB" in printed
    assert sorted(config.parent.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_dry_run_for_gpus_elsewhere_needs_no_gpu_here(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(config), "--dry-run", "--set", "engine.device=cuda"]
    words += ["--processes", "4", "--device-memory", "80", "--micro-batch-size", "auto"]
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert "4 processes" in printed
    assert "80.0 GiB" in printed


def test_one_process_trains_here_with_the_largest_micro_batch_that_fits(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", str(config), "--micro-batch-size", "auto") == 0
    printed = capsys.readouterr()
    folder = Path(printed.out.strip().splitlines()[-1])
    record = JakiroDrafter.from_pretrained(folder).config.record
    assert record["settings"]["batch"]["micro_batch_size"] == 4
    assert "micro_batch_size: 4" in (config.parent / "run" / "config.yaml").read_text()


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_are_launched(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    words = ["--config", str(config), "--processes", "2"]
    assert run(*words, "--set", "engine.zero_stage=2", "--micro-batch-size", "2") == 0
    folder = Path(capsys.readouterr().out.strip().splitlines()[-1])
    assert JakiroDrafter.from_pretrained(folder).config.record["training"]["step"] == 2
