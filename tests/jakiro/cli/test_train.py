"""`jakiro train` estimates a run, and launches it."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, tiny_run, write_jsonl

from jakiro.cli import main
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.utils import progress
from jakiro.utils.settings import dump_settings
from training.launch import LaunchOptions, command

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


def run(*words: str) -> object:
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(["train", *words])
    return exit_.value.code or 0


def test_a_dry_run_needs_no_weights_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "target" / "model.safetensors").unlink()
    before = sorted(config.parent.rglob("*"))
    words = ["--config", str(config), "--dry-run", "--processes", "2", "--device-memory", "80"]
    assert run(*words, "--device-speed", "400") == 0
    captured = capsys.readouterr()
    printed = captured.out
    for name in (
        "optimizer states",
        "activations",
        "states and cache",
        "disk",
        "80.0 GiB",
        "TFLOP",
    ):
        assert name in printed
    assert sorted(config.parent.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("micro_batch", ["1", "auto"])
def test_a_dry_run_for_several_machines_elsewhere_needs_no_gpu_here(
    config: Path, micro_batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = config.parent / "hosts"
    hostfile.write_text("one slots=2\ntwo slots=2\n")
    words = ["--config", str(config), "--dry-run", "--set", "engine.device=cuda"]
    words += [
        "--hostfile",
        str(hostfile),
        "--device-memory",
        "80",
        "--micro-batch-size",
        micro_batch,
    ]
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
    use, bench = printed.err.splitlines()[-2:]
    assert use == f"next: jakiro generate {folder} TEXT"  # as there is no chat template
    assert bench == (
        f"next: jakiro bench --target {config.parent / 'target'} --method transformers --method "
        f"drafter={folder} --prompts PROMPTS.jsonl"
    )
    assert "micro_batch_size: 4" in (config.parent / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_log_without_a_terminal_shows_the_progress_of_training_in_plain_lines(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.002)
    words = ["--config", str(config), "--set", "steps=4", "--set", "evaluation.every=4"]
    assert run(*words) == 0
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    figures = r"loss \d+\.\d+, agreement [\d. ]+: 2 of 4, [\d,]+ tokens/s, 0:\d\d elapsed, about 0:"
    assert re.search(rf"^drafter: {figures}\d\d left$", shown, re.MULTILINE), shown
    order = [
        *(f"INFO evaluating the drafter after step {n}" for n in (0, 4)),
    ]
    positions = [shown.index(line) for line in order]
    assert positions == sorted(positions)


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


def test_several_machines_are_passed_to_the_launcher(config: Path) -> None:
    hostfile = config.parent / "hosts"
    hostfile.write_text("one slots=4\ntwo slots=4\nthree slots=2\n")
    settings = tiny_run(config.parent, engine={"device": "cpu"})
    taking_part = LaunchOptions(hostfile=hostfile, nodes=2, deepspeed=("--master_addr", "one"))
    assert taking_part.count(settings) == 8
    assert LaunchOptions(processes=3, hostfile=hostfile).count(settings) == 8
    words = command(settings, config, ["steps=2"], taking_part)
    assert words[0] == sys.executable
    assert words[3:] == [
        *("--hostfile", str(hostfile), "--num_nodes", "2"),
        *("--master_addr", "one", "--module", "training.train"),
        *("--config", str(config), "--set", "steps=2"),
    ]
    with pytest.raises(ConfigError, match="too few machines"):
        LaunchOptions(hostfile=hostfile, nodes=4).count(settings)
