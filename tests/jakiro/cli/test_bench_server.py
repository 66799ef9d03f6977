"""`jakiro bench --url` measures a server, stores the figures, and explains mistakes in one line."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.serving import MODEL, Running, running, tiny_decoder

from inference.device import attempts
from inference.generation.incremental_text import IncrementalText

KEY = "secret-key-1"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_decoder(), api_keys=(KEY, "secret-key-2")) as found:
        yield found


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAKIRO_API_KEY", f"{KEY},another-key")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("def main(\nprint(\nreturn 41\n")
    return str(file)


def test_a_load_is_shown_and_stored(
    server: Running, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    words = ["bench", "--url", server.root, "--model", MODEL, "--prompts", prompts]
    options = ["--max-new-tokens", "8", "--temperature", "0", "--temperature", "1", "--check"]
    shares = ["--requests", "12", "--concurrency", "3", "--bad-share", "0.3"]
    assert exit_code(*words, *options, *shares, "--json", str(file)) == 0
    shown = capsys.readouterr().out
    for part in (
        f"{MODEL} at {server.url}",
        "under load",
        "tokens/s",
        "refused",
        "answers equal to those alone",
    ):
        assert part in shown
    stored = json.loads(file.read_text())
    assert stored["settings"]["requests"] == 12
    assert stored["settings"]["temperatures"] == [0.0, 1.0]
    assert stored["figures"]["requests"] == 12
    assert stored["environment"]["versions"]["jakiro"]
    assert KEY not in file.read_text() + shown


def test_clients_draft_and_lose_replies(
    prompts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_FIRST_PAUSE", 0.001)
    words = ["--prompts", prompts, "--max-new-tokens", "8", "--check", "--concurrency", "2"]
    drafts = ["--device-drafter", "lookup", "--lost-share", "0.3"]
    with running(tiny_decoder(), api_keys=(KEY,), remote_sessions=2) as server:
        assert exit_code("bench", "--url", server.root, *words, *drafts) == 0
        shown = capsys.readouterr().out
        assert exit_code("bench", "--url", server.root, *words, "--lost-share", "0.3") == 2
    assert "answers equal to those alone: 3 of 3 greedy" in shown
    assert "decoding steps of clients that draft" in shown
    assert "--lost-share requires --device-drafter" in capsys.readouterr().err


def test_figures_on_standard_output_can_be_read(
    server: Running, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--url", server.url, "--prompts", prompts, "--num-prompts", "1"]
    assert exit_code(*words, "--max-new-tokens", "4", "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["figures"]["tokens"] == 4
    assert "tokens/s" in captured.err


def test_a_difference_gives_exit_code_1(
    server: Running,
    prompts: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    correct = IncrementalText.push

    def planted(text: IncrementalText, token_id: int) -> str:
        found = correct(text, token_id)
        return found.upper() if server.server.engine.scheduler.num_running > 1 else found

    monkeypatch.setattr(IncrementalText, "push", planted)
    words = ["bench", "--url", server.url, "--prompts", prompts, "--check", "--requests", "20"]
    assert exit_code(*words, "--max-new-tokens", "16") == 1
    assert "differs after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "another"], "does not have this model"),
        (["--requests", "3", "--seconds", "3"], "--requests and --seconds"),
        (["--bad-share", "2"], "'--bad-share'"),
        (["--concurrency", "0"], "'--concurrency'"),
        (["--url", "nonsense"], "URL is not the address"),
        (["--method", "lookup"], "--url measures a server; other options would have no effect"),
        (["--prompts", "missing.txt"], "there is no file"),
        (["--max-new-tokens", "1000"], "does not answer a request"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    server: Running,
    prompts: str,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("bench", "--url", server.url, "--prompts", prompts, *words) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in error


def test_a_missing_key_and_a_missing_server_are_named(
    server: Running,
    prompts: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JAKIRO_API_KEY")
    assert exit_code("bench", "--url", server.url, "--prompts", prompts) == 2
    assert "refuses the API key" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert exit_code("bench", "--url", f"http://127.0.0.1:{port}", "--prompts", prompts) == 2
    assert "cannot reach the server" in capsys.readouterr().err


def test_options_of_servers_require_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "--target", ".", "--concurrency", "4") == 2
    assert "--concurrency requires --url" in capsys.readouterr().err
    assert exit_code("bench", "--url", "http://127.0.0.1:1") == 2
    assert "there are no prompts to send" in capsys.readouterr().err
