"""A mistake of a user ends in one line on standard error, without a traceback, and exit code 2."""

import json
import socket
from pathlib import Path

import pytest
import torch
from helpers.commands import exit_code, write_models

from jakiro.utils.fetch import KNOWN_MODELS

RUN = """\
extends: base
target: {name_or_path: target}
data: {paths: [chats.jsonl], cache_folder: cache}
engine: {device: cpu}
"""
BENCH = "bench --target target --prompts prompts.txt --device cpu"
TRAIN = "train --config my.yaml"

MISTAKES = {
    "generate owner/nope Why?": "cannot load a drafter from owner/nope",
    "generate lookup Why? --target owner/nope": "cannot load the target owner/nope",
    "generate lookup Why?": "a target must be given",
    "generate lokup Why? --target target": "use lookup",
    "generate smollm2-135-instruct Why?": "use smollm2-135m-instruct",
    "generate target Why?": "is a llama model, not a drafter",
    "generate drafter Why? --target other": "made for a target other than",
    "generate drafter Why? --threads none": "--threads",
    "generate drafter Why? --device cuda": "no GPU",
    "generate drafter Why? --max-new-tokens 9999": "do not fit into the target's context",
    "generate drafter Why? --system short": "--system",
    "generate drafter": "Missing argument 'prompt'",
    "chat drafter": "chat template",
    f"{BENCH} --method lokup": "lokup",
    f"{BENCH} --method lookup --baseline aded": "--baseline",
    f"{BENCH} --method lookup --json taken": "--json",
    f"{BENCH} --method lookup --report -": "--report",
    f"{BENCH} --method drafter=drafter --replay --report a.html": "--report",
    "bench --target target --method lookup --prompts broken.jsonl": "broken.jsonl:2",
    "verify": "nothing to verify",
    "verify --url http://127.0.0.1:9/v1 --target target": "127.0.0.1:9",
    "serve --drafter lookup --target target --port PORT": "cannot listen",
    "serve --drafter lookup --target target --host 0.0.0.0": "JAKIRO_API_KEY",
    "serve --drafter lookup --target target --keys-file nope --port 0": "nope",
    "train --config nope.yaml": "nope.yaml",
    f"{TRAIN} --set stepz=1": "did you mean 'steps'",
    f"{TRAIN} --set steps=1 --set data.paths=[nope.jsonl]": "there is no file or folder nope.jsonl",
    "ablate --base my.yaml --config nope.yaml --out study": "nope.yaml",
    "ablate --base base --out study --config base study --num-prompts 1": "'--num-prompts'",
    "prepare data --target target --data nope.jsonl": "there is no file or folder nope.jsonl",
    "prepare trigrams --corpus nope.txt --tokenizer target --out t": "nope.txt",
    "regenerate --target target --data . --out own.jsonl": "would be read as data",
    "init target --out taken": "already exists",
    "fetch nope": "no known model",
    "import drafter --target target": "--out",
    "export drafter --to vllm --out taken": "already exists",
    "export drafter --to eagle3 --out new": "drafter",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter, another target, and files that are right or wrong."""
    folder = write_models(tmp_path_factory.mktemp("mistakes"))
    (folder / "prompts.txt").write_text("Why?\n")
    (folder / "chats.jsonl").write_text(json.dumps({"text": "def main(): return 41"}) + "\n")
    (folder / "broken.jsonl").write_text(json.dumps({"prompt": "a", "text": "a"}) + "\n{\n")
    (folder / "my.yaml").write_text(RUN)
    (folder / "taken").touch()
    return folder


@pytest.fixture(autouse=True)
def _alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    monkeypatch.delenv("JAKIRO_API_KEY", raising=False)


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = words.replace("PORT", str(taken.getsockname()[1]))
        assert exit_code(*command.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = (line for line in lines if line.startswith("error: "))
    assert error == lines[-1]
    assert MISTAKES[words] in error
    assert not any(line.startswith("Traceback") for line in lines)


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jakiro.utils.packaged.find_spec", lambda package: None)
    assert exit_code(*f"{TRAIN} --set steps=1".split()) == 2
    assert "[train]" in capsys.readouterr().err
    assert exit_code(*f"{BENCH} --method lookup --report a.html".split()) == 2
    assert "[bench]" in capsys.readouterr().err
    assert exit_code("fetch", next(iter(KNOWN_MODELS))) == 2  # before the download
    assert "[gguf]" in capsys.readouterr().err


def test_a_variable_without_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAKIRO_API_KEY", " , ")
    assert exit_code("serve", "--drafter", "lookup", "--target", "target") == 2
    assert "JAKIRO_API_KEY has no key" in capsys.readouterr().err
