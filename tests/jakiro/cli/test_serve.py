"""`jakiro serve`: one line when it is ready, and exit code 0 after SIGTERM."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.templates import family_tokenizer
from openai import OpenAI

from inference.serving.settings import ServeSettings


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "tiny-target"
    tokenizer = family_tokenizer("chatml")
    tiny_llama(vocab=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.timeout(120)
def test_a_server_is_ready_and_drains(target: Path) -> None:
    words = ["serve", "--target", str(target), "--drafter", "lookup", "--port", "0"]
    options = ["--tree", "fixed", "--threads", "1", "--places", "2"]
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
            found = client.completions.create(model="tiny-target", prompt="main", max_tokens=3)
            assert found.usage is not None
            assert found.usage.completion_tokens == 3
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
