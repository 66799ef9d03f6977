"""Drafters inside vLLM draft what the project's own forward drafts, and change no text.

vLLM runs in processes of its own (`engine.py`); `make test-vllm` makes the environment.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.vllm_drafters import (
    NUM_LAYERS,
    PROMPT,
    VOCAB,
    drafted_chain,
    fitted_drafter,
    greedy,
    target_model,
)
from torch import Tensor

from jakiro.drafter import JakiroDrafter
from jakiro.exchange.vllm_export import export_vllm
from jakiro.exchange.writing import write_export
from jakiro.target.adapter import TargetAdapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm.config") is None, reason="run `make test-vllm`"),
]

ENGINE = Path(__file__).with_name("engine.py")
DRAFTS, LENGTH, NUM_TEXTS = 4, 32, 8
CLOSE = 2e-3  # largest difference of log-probabilities, in single precision

TRUNK = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "first_position": False}
MEMORY = {"source": "hidden", "layers": tuple(range(NUM_LAYERS + 1))}
WIDE = {"fusion_layers": (2, 3, 4), "input": "wide", "attention_norm": False}
KINDS: dict[str, dict[str, Any]] = {
    "feedback": {
        "trunk": {"kind": "feedback", "fusion_layers": (4, 1, 3)},
        "draft_vocab_size": 128,
    },
    "own head": {
        "trunk": {"kind": "feedback", "input_bias": False, **WIDE},
        "draft_vocab_size": 128,
        "combine": "sum",
        "head": "own",
        "output_norm": "head",
        "num_experts": 1,
    },
    "hybrid, hidden": {"trunk": {"kind": "hybrid"}, "combine": "sum", **MEMORY},
    "moa, hidden": {"trunk": {"kind": "moa"}, "num_experts": 4, "parallel_levels": 2, **MEMORY},
    "hybrid, keys and values": {"trunk": {"kind": "hybrid"}},
}


class World(NamedTuple):
    """A target, its folder, and its greedy texts.

    Attributes:
        model: target.
        folder: folder of the target.
        prompts: prompts; the first one is compared in detail.
        texts: prompts of the same length, continued greedily.
    """

    model: Any
    folder: Path
    prompts: list[list[int]]
    texts: Tensor


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("target")
    model = target_model()
    model.save_pretrained(folder)
    source = random.Random(0)
    prompts = [PROMPT] + [[source.randrange(VOCAB) for _ in PROMPT] for _ in range(NUM_TEXTS - 1)]
    texts = torch.tensor([ids + greedy(model, ids, LENGTH + DRAFTS) for ids in prompts])
    return World(model, folder, prompts, texts)


@pytest.fixture(scope="module", params=list(KINDS))
def drafter(request: pytest.FixtureRequest, world: World) -> JakiroDrafter:
    """A drafter of each kind, fitted to the target's texts."""
    arguments = dict(KINDS[request.param])
    arguments["trunk"] = TRUNK | arguments["trunk"]
    settings = tiny_settings(**arguments)
    return fitted_drafter(TargetAdapter(world.model), settings, world.texts, steps=60)


def _exported(drafter: JakiroDrafter, world: World, folder: Path) -> Path:
    exported = export_vllm(drafter, TargetAdapter(world.model))
    write_export(exported.weights, exported.config, folder)
    return folder


def _engine(folder: Path, record: bool = False, **request: Any) -> subprocess.CompletedProcess[str]:
    (folder / "request.json").write_text(json.dumps(request | {"drafts": DRAFTS}))
    files = ["request.json", "answer.json", "logits.pt" if record else "-"]
    command = [sys.executable, ENGINE, *files]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _answer(folder: Path, **request: Any) -> dict[str, Any]:
    run = _engine(folder, **request)
    assert run.returncode == 0, run.stderr[-4000:]
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer


def test_text_accepted_counts_and_logits_are_those_of_our_forward(
    drafter: JakiroDrafter,
    world: World,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    answer = _answer(
        tmp_path,
        record=True,
        target=str(world.folder),
        drafter=str(_exported(drafter, world, tmp_path / "drafter")),
        prompts=[PROMPT],
        max_tokens=LENGTH,
    )
    text = world.texts[0].tolist()
    assert answer["texts"][0][0] == text[len(PROMPT) : len(PROMPT) + LENGTH]
    recorded = torch.load(tmp_path / "logits.pt")
    target, known, accepted, calls = TargetAdapter(world.model), len(PROMPT), [0] * DRAFTS, 0
    steps = 0
    while known + 1 < len(PROMPT) + LENGTH:  # vLLM has the root `text[known]`, and drafts after it
        chain, log_probs = drafted_chain(drafter, target, text[: known + 1], DRAFTS)
        got = torch.cat(recorded[calls : calls + DRAFTS]).log_softmax(-1)
        finite = log_probs.isfinite()
        assert torch.equal(got.isfinite(), finite)
        assert float((got - log_probs)[finite].abs().max()) < CLOSE
        assert got.argmax(-1).tolist() == chain
        follow = text[known + 1 : known + 1 + DRAFTS]
        agree = [drafted == token for drafted, token in zip(chain, follow, strict=True)]
        count = [*agree, False].index(False)
        accepted = [total + (index < count) for index, total in enumerate(accepted)]
        known, calls, steps = known + count + 1, calls + DRAFTS, steps + 1
    counters = answer["counters"]
    assert counters["spec_decode_num_drafts"] == steps
    assert counters["spec_decode_num_accepted_tokens_per_pos"] == accepted
    tau = 1 + sum(accepted) / steps
    record_property("tau", round(tau, 2))
    assert tau > 1.5  # otherwise the drafter would test little


def test_many_requests_with_chunked_prefill_and_cached_prefixes_get_the_same_texts(
    drafter: JakiroDrafter, world: World, tmp_path: Path
) -> None:
    source = random.Random(5)
    shared = [source.randrange(VOCAB) for _ in range(100)]
    prompts = [
        shared[: source.choice((0, 96, 100))] + ids for ids in world.prompts for _ in range(2)
    ]
    answer = _answer(
        tmp_path,
        target=str(world.folder),
        drafter=str(_exported(drafter, world, tmp_path / "drafter")),
        prompts=prompts,
        max_tokens=LENGTH,
        runs=2,
        options={
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "enable_prefix_caching": True,
        },
    )
    expected = [greedy(world.model, ids, LENGTH) for ids in prompts]
    assert answer["texts"] == [expected, expected]
    assert answer["counters"]["prefix_cache_hits"] > 0
    assert answer["counters"]["spec_decode_num_accepted_tokens"] > 0


def test_another_target_is_refused_by_name(world: World, tmp_path: Path) -> None:
    settings = tiny_settings(trunk=TRUNK | {"kind": "feedback"})
    drafter = fitted_drafter(TargetAdapter(world.model), settings, world.texts, steps=0)
    other = tiny_llama(VOCAB, hidden_size=128, head_dim=32, max_position_embeddings=512)
    other.save_pretrained(tmp_path / "other")
    run = _engine(
        tmp_path,
        target=str(tmp_path / "other"),
        drafter=str(_exported(drafter, world, tmp_path / "drafter")),
        prompts=[PROMPT],
        max_tokens=1,
    )
    assert run.returncode != 0
    assert "exported for another target (hidden size differs); expected: 64" in run.stderr
