"""`jakiro verify`: one line per check; exit code 0 or 1 for the result, 2 for mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer

from inference.decoder import SpeculativeDecoder
from jakiro.cli import main
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target

QUICK = ("--max-new-tokens", "4", "--samples", "50", "--top-k", "8", "--device", "cpu")


@pytest.fixture(scope="module")
def drafter_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    record = record_target(TargetAdapter(model).spec, str(folder / "target"), tokenizer)
    torch.manual_seed(0)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(folder / "drafter")
    return folder / "drafter"


@pytest.fixture
def prompts_path(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def main("}\n{"prompt": "print("}\n')
    return path


def _run(drafter: Path, *words: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", "--drafter", str(drafter), *map(str, words)])
    return int(exit_info.value.code or 0)


def test_a_correct_drafter_gives_a_line_per_check_a_verdict_and_exit_code_0(
    drafter_path: Path, prompts_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert _run(drafter_path, "--prompts", prompts_path, "--json", figures, *QUICK) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["greedy equality", "sequence distribution", "token ranks", "impossible tokens"]
    assert [line.split(":")[0] for line in lines[:4]] == [f"pass  {name}" for name in names]
    assert lines[4].startswith("pass  ")
    assert lines[4].endswith("in float32: 4 of 4 checks passed")
    stored = json.loads(figures.read_text())
    assert stored["passed"] is True
    assert stored["settings"]["top_k"] == 8
    assert [check["name"] for check in stored["checks"]] == names
    assert stored["checks"][1]["p_value"] >= stored["checks"][1]["threshold"]


def test_a_faulty_decoder_gives_exit_code_1_and_says_where(
    drafter_path: Path,
    prompts_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    correct = SpeculativeDecoder.generate

    def fault(self: SpeculativeDecoder, prompt: Any, **arguments: Any) -> object:
        output = correct(self, prompt, **arguments)
        output.new_token_ids[1] = 7
        return output

    monkeypatch.setattr(SpeculativeDecoder, "generate", fault)
    words = ("--prompts", prompts_path, "--num-prompts", "1", "--sampled-prompts", "0")
    assert _run(drafter_path, *words, *QUICK) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  greedy equality: 1 prompt, 1 tokens equal")
    assert "difference: prompt 1, new token 2" in lines[1]
    assert "0 of 1 checks passed" in lines[2]


def test_other_weights_of_the_target_are_possible_with_a_warning(
    drafter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, other, figures = tiny_tokenizer(), tmp_path / "other", tmp_path / "figures.json"
    tiny_llama(vocab=len(tokenizer), seed=5).save_pretrained(other)
    tokenizer.save_pretrained(other)
    words = ("--target", other, "--num-prompts", "1", "--sampled-prompts", "0", *QUICK)
    assert _run(drafter_path, *words) == 2
    assert "or allow other weights: with other_weights=True" in capsys.readouterr().err
    assert _run(drafter_path, *words, "--other-weights", "--json", figures) == 0
    assert "made for other weights" in capsys.readouterr().err
    stored = json.loads(figures.read_text())
    assert stored["settings"]["other_weights"] is True
    assert stored["gguf_sha256"] is None
