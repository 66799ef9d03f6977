"""`jakiro generate`: text on standard output, a caller's mistake as one line on the other."""

import json
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer

from jakiro.cli import main
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


@pytest.fixture
def drafter_path(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    record = record_target(TargetAdapter(model).spec, str(tmp_path / "target"), tokenizer)
    torch.manual_seed(0)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", *words])
    return int(exit_info.value.code or 0)


def test_the_continuation_goes_to_standard_output(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(str(drafter_path), "def main(", "--max-new-tokens", "9") == 0
    assert capsys.readouterr().out.strip()


def test_figures_go_to_standard_error(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(str(drafter_path), "def main(", "--max-new-tokens", "9", "--stats") == 0
    assert "9 tokens, tau " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["def", "--temperature", "-0.5"], "this temperature cannot be used"),
        ([""], "the prompt is empty"),
        (["def " * 200], "do not fit into the target's context"),
        (["def", "--max-new-tokens", "0"], "max_new_tokens"),
        (["def", "--target", "nowhere/to be found"], "cannot load the target"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    drafter_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(str(drafter_path), *words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_drafter_of_another_target_is_refused(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = drafter_path.parent / "other"
    tiny_llama(vocab=len(tiny_tokenizer()), seed=3).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    assert _run(str(drafter_path), "def", "--target", str(other)) == 2
    assert "made for a target other than" in capsys.readouterr().err


def test_damaged_weights_are_refused(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (drafter_path / "model.safetensors").write_bytes(b"half of it")
    assert _run(str(drafter_path), "def") == 2
    assert "error: cannot load a drafter" in capsys.readouterr().err


def test_a_config_that_is_not_json_is_refused(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (drafter_path / "config.json").write_text(json.dumps({})[:1])
    assert _run(str(drafter_path), "def") == 2
    assert "error: " in capsys.readouterr().err
