"""Commands to serve an exported drafter can be pasted into a shell."""

import json
import shlex

import pytest

from jakiro.exchange.serve_commands import serve_commands

TARGET, FOLDER = "/models/the target's", 'exported/my "drafter"'


def test_the_layout_of_speculators_names_its_target_itself() -> None:
    (command,) = serve_commands("speculators", FOLDER, TARGET, 4).values()
    assert shlex.split(command) == ["vllm", "serve", FOLDER]


@pytest.mark.parametrize("layout", ["eagle3", "vllm"])
def test_quotes_and_spaces_in_paths_are_kept(layout: str) -> None:
    words = shlex.split(serve_commands(layout, FOLDER, TARGET, 4)["vLLM"])
    assert words[:4] == ["vllm", "serve", TARGET, "--speculative-config"]
    options = {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 4}
    assert json.loads(words[4]) == options


def test_sglang_serves_only_the_layout_of_eagle3() -> None:
    words = shlex.split(serve_commands("eagle3", FOLDER, TARGET, 4)["SGLang"])
    assert words[words.index("--model-path") + 1] == TARGET
    assert words[words.index("--speculative-draft-model-path") + 1] == FOLDER
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"
    for layout in ("speculators", "vllm"):
        assert "SGLang" not in serve_commands(layout, FOLDER, TARGET, 4)
