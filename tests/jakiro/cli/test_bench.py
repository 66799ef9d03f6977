"""`jakiro bench` prints figures, writes a file and a page, and refuses mistakes."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer

from inference.benchmark.document import read_document
from inference.benchmark.method_names import KINDS
from inference.benchmark.methods import OwnDecoding
from inference.benchmark.replay.comparison import ReplayDocument
from jakiro.cli import main
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target

Bench = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter and prompts."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    record = record_target(TargetAdapter(model).spec, str(folder / "target"), tokenizer)
    torch.manual_seed(0)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(folder / "drafter")
    records = [{"prompt": text} for text in ("def main(", "print(", "return 41", "import")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def bench(folder: Path) -> Bench:
    """A function that runs the command on the tiny models and returns its exit code."""

    def run(*words: str, target: str = "target", prompts: str = "prompts.jsonl") -> int:
        places = ["--target", str(folder / target), "--prompts", str(folder / prompts)]
        with pytest.raises(SystemExit) as exit_info:
            main(["bench", *places, "--device", "cpu", "--max-new-tokens", "6", *words])
        return int(exit_info.value.code or 0)

    return run


def test_one_command_measures_and_draws(
    bench: Bench, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "a.json", tmp_path / "a.html"
    method = f"drafter={folder / 'drafter'},candidates=4"
    words = ["--method", "autoregressive", "--method", method, "--num-prompts", "3"]
    words += ["--temperature", "0", "--temperature", "1"]
    assert bench(*words, "--json", str(file), "--report", str(page)) == 0
    assert "speed-up over autoregressive" in capsys.readouterr().out
    document = read_document(file)
    assert document.prompts == 3
    assert document.settings.temperatures == (0.0, 1.0)
    assert document.figures("drafter", 0.0).identical_to_target
    assert page.read_text().lower().startswith("<!doctype html>")


def test_a_replay_compares_drafters_on_the_same_texts(
    bench: Bench, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, method = tmp_path / "a.json", f"drafter={folder / 'drafter'}"
    words = ["--replay", "--method", f"{method},name=one", "--method", f"{method},name=two"]
    assert bench(*words, "--temperature", "1", "--json", str(file)) == 0
    assert "tau / one" in capsys.readouterr().out
    document = ReplayDocument.model_validate_json(file.read_text())
    assert [row.drafter for row in document.rows] == ["one", "two"]
    assert bench(*words, "--method", f"{method},name=one") == 2
    assert "different numbers of trainings" in capsys.readouterr().err


def test_values_on_standard_output_can_be_read_by_another_program(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--method", "autoregressive", "--num-prompts", "1", "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["prompts"] == 1
    assert "tok/s" in captured.err
    assert not Path("-").exists()


def test_all_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--list-methods"])
    assert not exit_info.value.code
    printed = capsys.readouterr().out
    for kind in KINDS:
        assert kind in printed


def test_other_weights_of_the_target_are_possible_with_a_warning(
    bench: Bench, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = tiny_tokenizer(), tmp_path / "a.json"
    tiny_llama(vocab=len(tokenizer), seed=5).save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    method = f"drafter={folder / 'drafter'},tree=fixed"
    words = ["--method", method, "--method", f"lookup+{method},name=pair", "--num-prompts", "1"]
    assert bench(*words, target="other") == 2
    assert "or allow other weights: with other_weights=True" in capsys.readouterr().err
    assert bench(*words, "--other-weights", "--json", str(out), target="other") == 0
    shown = capsys.readouterr()
    assert "made for other weights" in shown.err
    assert "Weights of the target: float32." in shown.out
    document = read_document(out)
    assert document.settings.other_weights
    assert all(method.identical_to_target for method in document.methods)


def test_sigterm_ends_with_what_was_measured(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, counts = OwnDecoding.start, [0]

    def start(self: OwnDecoding, *args: Any) -> Any:
        counts[0] += 1
        if counts[0] == 4:
            signal.raise_signal(signal.SIGTERM)
        return measure(self, *args)

    monkeypatch.setattr(OwnDecoding, "start", start)
    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "a.json"
    assert bench("--method", "autoregressive", "--json", str(out)) == 130
    assert not read_document(out).is_complete
    assert signal.getsignal(signal.SIGTERM) == before
