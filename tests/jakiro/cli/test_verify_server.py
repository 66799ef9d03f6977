"""`jakiro verify --url` checks a server against its target, which is computed here."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.serving import Running, running, tiny_decoder

from inference.generation.incremental_text import IncrementalText

QUICK = ["--max-new-tokens", "8", "--samples", "60", "--top-k", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_decoder(trained=True)) as found:
        yield found


@pytest.fixture(scope="module")
def target(server: Running, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the server's target and tokenizer."""
    folder = tmp_path_factory.mktemp("verify") / "target"
    decoder = server.server.engine.decoder
    decoder.target.model.save_pretrained(folder)
    assert decoder.tokenizer is not None
    decoder.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_lossless_server_gives_a_line_per_check_and_exit_code_0(
    server: Running, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verify.json"
    words = ["verify", "--url", server.root, "--target", target, "--num-prompts", "3"]
    assert exit_code(*words, *QUICK, "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["greedy texts", "seeds", "sequence distribution", "token ranks", "impossible tokens"]
    assert [line.split(":")[0] for line in lines[:5]] == [f"pass  {name}" for name in names]
    assert lines[5].endswith("in float32: 5 of 5 checks passed")
    stored = json.loads(file.read_text())
    assert stored["passed"] is True
    assert stored["url"] == server.url
    assert [check["name"] for check in stored["checks"]] == names


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
    words = ["verify", "--url", server.url, "--target", target, "--sampled-prompts", "0"]
    assert exit_code(*words, *QUICK) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  greedy texts: 8 prompts")
    assert "difference: prompt" in lines[1]
