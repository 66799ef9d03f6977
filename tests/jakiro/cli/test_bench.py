"""`jakiro bench` prints figures, writes a file and a page, and refuses mistakes."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code, write_models

from inference import SpeculativeDecoder
from inference.benchmark.document import read_document
from inference.benchmark.methods import JakiroDecoding
from inference.benchmark.settings import KINDS
from inference.drafters.combined.drafter import CombinedDrafter
from inference.trees.shape import TreeShape

Bench = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter and prompts."""
    folder = write_models(tmp_path_factory.mktemp("models"))
    records = [{"prompt": text} for text in ("def main(", "print(", "return 41", "import")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def bench(folder: Path) -> Bench:
    """A function that runs the command on the tiny models and returns its exit code."""

    def run(*words: object, target: str = "target") -> int:
        paths = ["--target", folder / target, "--prompts", folder / "prompts.jsonl"]
        return exit_code("bench", *paths, "--device", "cpu", "--max-new-tokens", "6", *words)

    return run


def test_one_command_measures_and_draws(
    bench: Bench, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "a.json", tmp_path / "a.html"
    method = f"drafter={folder / 'drafter'},candidates=4"
    words = ["--method", "autoregressive", "--method", method, "--num-prompts", "3"]
    words += ["--temperature", "0", "--temperature", "1"]
    assert bench(*words, "--json", file, "--report", page) == 0
    assert "speed-up over autoregressive" in capsys.readouterr().out
    document = read_document(file)
    assert document.prompts == 3
    assert document.settings.temperatures == (0.0, 1.0)
    assert document.figures("drafter", 0.0).identical_share == 1
    assert page.read_text().lower().startswith("<!doctype html>")


def test_drafters_that_need_no_training_are_measured_and_decode_exactly(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    out, settings = tmp_path / "a.json", tmp_path / "own.yaml"
    settings.write_text("depth: 3\n")
    small = f"lm={folder / 'other'}"
    methods = ["autoregressive", f"aded,settings={settings},name=own", f"aded+{small},name=pair"]
    methods += ["lookup,candidates=6", f"{small},candidates=9", "lookup,merged-repeats=9,name=more"]
    words = [word for method in methods for word in ("--method", method)]
    assert bench(*words, "--num-prompts", "2", "--json", out, "--temperature", "0") == 0
    document = read_document(out)
    for name in ("own", "pair", "lookup", "lm", "more"):
        assert document.figures(name, 0.0).identical_share == 1


def test_a_tree_goes_to_the_trained_drafter_of_a_pair(folder: Path) -> None:
    name, tree = f"lookup+drafter={folder / 'drafter'}", TreeShape(num_nodes=5)
    decoder = SpeculativeDecoder.from_pretrained(name, folder / "target", tree)
    assert isinstance(decoder.drafter, CombinedDrafter)
    assert decoder.drafter.first.plan.greedy == tree


def test_a_replay_compares_drafters_on_the_same_texts(
    bench: Bench, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, method = tmp_path / "a.json", f"drafter={folder / 'drafter'}"
    words = ["--replay", "--method", f"{method},name=one", "--method", f"{method},name=two"]
    assert bench(*words, "--temperature", "1", "--json", file) == 0
    assert "tau / one" in capsys.readouterr().out
    assert [method.family for method in read_document(file).methods] == ["one", "two"]
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
    assert exit_code("bench", "--list-methods") == 0
    printed = capsys.readouterr().out
    assert [kind for kind in KINDS if kind not in printed] == []


def test_other_weights_of_the_target_are_possible_with_a_warning(
    bench: Bench, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, method = tmp_path / "a.json", f"drafter={folder / 'drafter'},tree=fixed"
    words = ["--method", method, "--method", f"lookup+{method},name=pair", "--num-prompts", "1"]
    assert bench(*words, target="other") == 2
    assert "or allow other weights: with other_weights=True" in capsys.readouterr().err
    assert bench(*words, "--other-weights", "--json", out, target="other") == 0
    shown = capsys.readouterr()
    assert "made for other weights" in shown.err
    assert "Weights of the target: float32." in shown.out
    document = read_document(out)
    assert document.settings.other_weights
    assert all(method.identical_share == 1 for method in document.methods)


def test_sigterm_ends_with_what_was_measured(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, counts = JakiroDecoding.start, [0]

    def start(self: JakiroDecoding, *args: Any) -> Any:
        counts[0] += 1
        if counts[0] == 4:
            signal.raise_signal(signal.SIGTERM)
        return measure(self, *args)

    monkeypatch.setattr(JakiroDecoding, "start", start)
    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "a.json"
    assert bench("--method", "autoregressive", "--json", out) == 130
    assert not read_document(out).is_complete
    assert signal.getsignal(signal.SIGTERM) == before
