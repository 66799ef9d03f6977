"""`jakiro verify`, for a drafter or for a server: one line per check; exit code 0 or 1."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code, write_models
from helpers.serving import Running, running, tiny_decoder

from inference.decoder import SpeculativeDecoder
from inference.generation.incremental_text import IncrementalText

SERVER_QUICK = ("--max-new-tokens", "8", "--device", "cpu")
QUICK = ("--max-new-tokens", "4", "--samples", "50", "--top-k", "8", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and prompts."""
    folder = write_models(tmp_path_factory.mktemp("models"))
    (folder / "prompts.jsonl").write_text('{"prompt": "def main("}\n{"prompt": "print("}\n')
    return folder


def _verify(folder: Path, *words: object) -> int:
    paths = ("--drafter", folder / "drafter", "--prompts", folder / "prompts.jsonl")
    return exit_code("verify", *paths, *QUICK, *words)


def test_a_correct_drafter_gives_a_line_per_check_a_verdict_and_exit_code_0(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert _verify(folder, "--json", figures) == 0
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
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = SpeculativeDecoder.generate

    def fault(self: SpeculativeDecoder, prompt: Any, **arguments: Any) -> object:
        output = correct(self, prompt, **arguments)
        output.new_token_ids[1] = 7
        return output

    monkeypatch.setattr(SpeculativeDecoder, "generate", fault)
    assert _verify(folder, "--num-prompts", "1", "--sampled-prompts", "0") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  greedy equality: 1 prompt, 1 tokens equal")
    assert "difference: prompt 1, new token 2" in lines[1]
    assert "0 of 1 checks passed" in lines[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_decoder(trained=True)) as server:
        yield server


@pytest.fixture(scope="module")
def target(server: Running, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the server's target and tokenizer."""
    folder = tmp_path_factory.mktemp("verify") / "target"
    decoder = server.server.engine.decoder
    decoder.target.model.save_pretrained(folder)
    assert decoder.tokenizer is not None
    decoder.tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_difference_gives_exit_code_1(
    server: Running,
    target: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    correct = IncrementalText.push

    def planted(text: IncrementalText, token_id: int) -> str:
        return correct(text, token_id).swapcase()

    monkeypatch.setattr(IncrementalText, "push", planted)
    words = ["verify", "--url", server.url, "--target", target]
    assert exit_code(*words, *SERVER_QUICK) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  greedy texts: 8 prompts")
    assert "difference: prompt" in lines[1]
