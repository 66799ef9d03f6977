"""Drafters inside vLLM draft what the project's own forward drafts, and change no text.

vLLM runs in processes of its own (`engine.py`); `make test-vllm` makes the environment.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.vllm_drafters import (
    NUM_LAYERS,
    VOCAB,
    SimulatedStep,
    accepted_per_position,
    fitted_drafter,
    simulated,
)
from helpers.vllm_engine import DRAFTS, MARKS, answers, eagle3, exported, recorded, start_engine
from helpers.vllm_world import LENGTH, World

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

pytestmark = MARKS

CLOSE = 2e-3  # largest difference of log-probabilities, in single precision

TRUNK = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "first_position": False}
HIDDEN = {"source": "hidden", "layers": tuple(range(NUM_LAYERS + 1))}
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
    "hybrid, hidden": {"trunk": {"kind": "hybrid"}, "combine": "sum", **HIDDEN},
    "hybrid, keys and values": {"trunk": {"kind": "hybrid"}},
    "hybrid, keys before rotation": {"trunk": {"kind": "hybrid"}, "rotated": False},
    "moa, hidden": {"trunk": {"kind": "moa"}, "num_experts": 4, "parallel_levels": 2, **HIDDEN},
    "moa, keys and values": {
        "trunk": {"kind": "moa"},
        "combine": "sum",
        "layers": (4, 0, 2),
        "draft_vocab_size": 128,
    },
}
MIXED = {"max_num_seqs": 8, "block_size": 32, "enable_prefix_caching": True}
CHUNK = 48  # tokens of a prompt that are read at once; long prompts have more than twice as many


@pytest.fixture(scope="module", params=list(KINDS))
def drafter(request: pytest.FixtureRequest, world: World) -> JakiroDrafter:
    """A drafter of each kind, fitted to the target's texts."""
    arguments = dict(KINDS[request.param])
    arguments["trunk"] = TRUNK | arguments["trunk"]
    settings = tiny_settings(**arguments)
    return fitted_drafter(TargetAdapter(world.model), settings, world.groups, steps=60)


@pytest.fixture(scope="module")
def undrafted(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM generates without a drafter."""
    (answer,) = answers(
        tmp_path_factory.mktemp("undrafted"),
        target=str(world.folder),
        speculative=None,
        options=MIXED,
        batches=[{"prompts": [prompt for prompt, _ in world.texts], "max_tokens": LENGTH}],
    )
    texts: list[list[int]] = answer["texts"]
    return texts


def _steps(drafter: JakiroDrafter, world: World, number: int) -> list[SimulatedStep]:
    """Return the steps in which drafting with our own forward writes a text."""
    prompt, text = world.texts[number]
    return list(simulated(drafter, TargetAdapter(world.model), text, len(prompt), DRAFTS))


def _assert_counted(answer: dict[str, Any], steps: Sequence[SimulatedStep]) -> None:
    counters = answer["counters"]
    assert counters["spec_decode_num_drafts"] == len(steps)
    found = counters["spec_decode_num_accepted_tokens_per_pos"]
    assert found == accepted_per_position(steps, DRAFTS)


def test_text_accepted_counts_and_logits_are_those_of_our_forward(
    drafter: JakiroDrafter,
    world: World,
    undrafted: list[list[int]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    prompts = [prompt for prompt, _ in world.texts]
    several = {"prompts": prompts, "max_tokens": LENGTH}
    chunked = several | {"chunk": CHUNK}
    alone, mixed, cached, *parts = answers(
        tmp_path,
        record=True,
        target=str(world.folder),
        speculative=eagle3(exported(drafter, world.model, tmp_path / "drafter")),
        options=MIXED,
        batches=[several | {"prompts": prompts[:1]}, several, several, chunked, chunked],
    )
    generated = [text[len(prompt) : len(prompt) + LENGTH] for prompt, text in world.texts]
    assert undrafted == generated
    assert alone["texts"] == generated[:1]
    assert [batch["texts"] for batch in (mixed, cached, *parts)] == [generated] * 4

    steps = _steps(drafter, world, 0)
    calls = recorded(tmp_path)[: alone["calls"]]
    assert len(calls) >= DRAFTS * len(steps)  # vLLM may draft once more after the last step
    for number, step in enumerate(steps):
        got = torch.cat(calls[DRAFTS * number : DRAFTS * (number + 1)]).log_softmax(-1)
        finite = step.log_probs.isfinite()
        assert torch.equal(got.isfinite(), finite)
        assert float((got - step.log_probs)[finite].abs().max()) < CLOSE
        assert got.argmax(-1).tolist() == step.chain
    _assert_counted(alone, steps)
    tau = 1 + sum(step.num_accepted for step in steps) / len(steps)
    record_property("tau", round(tau, 2))
    assert tau > 1.5  # otherwise the drafter would test little

    every = [step for number in range(len(prompts)) for step in _steps(drafter, world, number)]
    _assert_counted(mixed, every)
    _assert_counted(cached, every)
    assert cached["counters"]["prefix_cache_hits"] > mixed["counters"]["prefix_cache_hits"]
    # At the end of a chunk, vLLM gives drafters the last token of the prompt instead of the next.
    accepted = sum(step.num_accepted for step in every)
    for batch in parts:
        counted = batch["counters"]["spec_decode_num_accepted_tokens"]
        assert counted == pytest.approx(accepted, rel=0.1)
    assert parts[1]["counters"]["prefix_cache_hits"] > 0


def test_another_target_is_refused_by_name(world: World, tmp_path: Path) -> None:
    settings = tiny_settings(trunk=TRUNK | {"kind": "feedback"})
    drafter = fitted_drafter(TargetAdapter(world.model), settings, world.groups, steps=0)
    other = tiny_llama(VOCAB, hidden_size=128, head_dim=32, max_position_embeddings=512)
    other.save_pretrained(tmp_path / "other")
    run = start_engine(
        tmp_path,
        target=str(tmp_path / "other"),
        speculative=eagle3(exported(drafter, world.model, tmp_path / "drafter")),
        batches=[],
    )
    assert run.returncode != 0
    assert "exported for another target (hidden size differs); expected: 64" in run.stderr
