"""`jakiro generate`, `serve`, `fetch` and `demo`: texts, a process that serves, options."""

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code, write_models
from helpers.models import tiny_llama
from helpers.templates import family_tokenizer
from openai import OpenAI
from transformers import GenerationConfig

from inference import SpeculativeDecoder
from inference.serving.settings import ServeSettings
from jakiro.cli.decode import _write


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny-target"
    tokenizer = family_tokenizer("chatml")
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("is_terminal", "expected"), [(True, "a]0;x\nb"), (False, "a\x1b]0;x\x07\nb")]
)
def test_a_terminal_gets_no_control_characters(
    is_terminal: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    _write("a\x1b]0;x\x07\nb")
    assert capsys.readouterr().out == expected


def test_a_prompt_is_a_chat_message_if_the_target_has_a_chat_template(
    chat_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["lookup", "main(", "--target", chat_target, "--max-new-tokens", "8"]
    texts = {}
    for extra in ((), ("--raw",)):
        assert exit_code("generate", *words, *extra) == 0
        captured = capsys.readouterr()
        assert ("chat template" in captured.err) == ("--raw" not in extra)
        texts[extra] = captured.out.removesuffix("\n")
    system = (*words, "--system", "def")
    assert exit_code("generate", *system) == 0
    texts[system] = capsys.readouterr().out.removesuffix("\n")
    decoder = SpeculativeDecoder.from_pretrained("lookup", chat_target)
    user, instructions = {"role": "user", "content": "main("}, {"role": "system", "content": "def"}
    for text, prompt in zip(texts.values(), ([user], "main(", [instructions, user]), strict=True):
        assert text == decoder.generate(prompt, max_new_tokens=8).text
    assert len(set(texts.values())) == 3


def test_a_prompt_can_be_read_from_standard_input(
    chat_target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--target", chat_target, "--max-new-tokens", "8"]
    assert exit_code("generate", "lookup", "naïve", *words) == 0
    expected = capsys.readouterr().out
    for content, code, error in (
        ("naïve\n".encode(), 0, ""),
        (b"\xff\xfe", 2, "not text in UTF-8"),
        (b"", 2, "the prompt is empty"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        assert exit_code("generate", "lookup", "-", *words) == code
        captured = capsys.readouterr()
        assert error in captured.err
        assert captured.out == (expected if code == 0 else "")


def test_the_defaults_of_sampling_are_those_of_the_generation_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_models(tmp_path)
    words = [folder / "drafter", "def", "--max-new-tokens", "20"]
    assert exit_code("generate", *words) == 0
    greedy, error = capsys.readouterr()
    assert "target: target, float32, " in error
    GenerationConfig(do_sample=True, temperature=1.5).save_pretrained(folder / "target")
    assert exit_code("generate", *words, "--dtype", "fp32") == 0
    sampled, error = capsys.readouterr()
    assert sampled != greedy
    assert "target: " not in error  # the user has chosen its dtype
    for extra in (["--temperature", "0"], ["--top-k", "1"]):
        assert exit_code("generate", *words, *extra) == 0
        assert capsys.readouterr().out == greedy


@pytest.mark.timeout(120)
def test_a_server_is_ready_and_drains(chat_target: Path) -> None:
    words = ["serve", "--target", str(chat_target), "--drafter", "lookup", "--port", "0"]
    options = ["--tree", "fixed", "--threads", "1", "--places", "2", "--capacity", "256"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jakiro", *words, *options], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        ready = next(line for line in process.stderr if "ready: " in line)
        url = ready.partition("ready: ")[2].strip()
        assert next(process.stderr).strip() == f"playground: {url.removesuffix('v1')}"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny-target"]
            answer = client.completions.create(model="tiny-target", prompt="main", max_tokens=3)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAKIRO_API_KEY", "first-key-1, second-key-2 ,")
    keys = ServeSettings(host="0.0.0.0").api_keys
    assert [key.get_secret_value() for key in keys] == ["first-key-1", "second-key-2"]


def test_the_demo_gets_its_options(
    plant_demo: Callable[[Callable[..., None]], None], tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    plant_demo(lambda *options, store: (store("figures"), calls.append(options)))
    figures = tmp_path / "f.json"
    assert exit_code("demo") == 0
    words = ["--cache-dir", "c", "--device", "cpu", "--json", figures]
    assert exit_code("demo", *words) == 0
    assert figures.read_text() == "figures"
    assert calls == [(None, "auto"), (Path("c"), "cpu")]
