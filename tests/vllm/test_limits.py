"""Requests that are preempted, long or cut; targets with a window; half precision."""

from pathlib import Path

import pytest
import torch
from helpers.models import tiny_settings
from helpers.vllm_drafters import (
    accepted_per_position,
    drafted_chain,
    fitted_drafter,
    greedy,
    simulated,
    windowed_model,
)
from helpers.vllm_engine import DRAFTS, MARKS, answers, eagle3, exported, recorded
from helpers.vllm_world import LENGTH, World, world_of

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

pytestmark = MARKS

TRUNK = {
    "kind": "hybrid",
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "first_position": False,
}


def _fitted(world: World) -> JakiroDrafter:
    settings = tiny_settings(trunk=TRUNK)
    return fitted_drafter(TargetAdapter(world.model), settings, world.groups, steps=60)


def _generated(world: World) -> list[list[int]]:
    return [text[len(prompt) : len(prompt) + LENGTH] for prompt, text in world.texts]


@pytest.fixture(scope="module")
def drafter(world: World) -> JakiroDrafter:
    """A drafter that reads keys and values, feeds back features, and mixes two experts."""
    return _fitted(world)


def test_preempted_requests_and_requests_up_to_the_last_position_keep_their_texts(
    drafter: JakiroDrafter, world: World, tmp_path: Path
) -> None:
    longest = 160
    prompt, _ = world.texts[0]
    prompts = [prompt for prompt, _ in world.texts]
    first, second = answers(
        tmp_path,
        target=str(world.folder),
        speculative=eagle3(exported(drafter, world.model, tmp_path / "drafter")),
        # Two long requests fit into the cache.
        options={
            "max_num_seqs": 8,
            "max_model_len": longest,
            "block_size": 32,
            "num_gpu_blocks_override": 11,
        },
        batches=[
            {"prompts": prompts, "max_tokens": LENGTH},
            {"prompts": [prompt], "max_tokens": longest},
        ],
    )
    assert first["texts"] == _generated(world)
    assert first["counters"]["num_preemptions"] > 0
    assert second["texts"] == [greedy(world.model, prompt, longest - len(prompt))]


def test_the_window_of_a_target_is_not_that_of_its_drafter(tmp_path: Path) -> None:
    world = world_of(windowed_model(16), tmp_path / "target")
    drafter = _fitted(world)
    texts = world.texts[:8]
    (answer,) = answers(
        tmp_path,
        target=str(world.folder),
        speculative=eagle3(exported(drafter, world.model, tmp_path / "drafter")),
        batches=[{"prompts": [prompt for prompt, _ in texts], "max_tokens": LENGTH}],
    )
    assert answer["texts"] == _generated(world)[:8]
    target = TargetAdapter(world.model)
    steps = [
        step
        for prompt, text in texts
        for step in simulated(drafter, target, text, len(prompt), DRAFTS)
    ]
    found = answer["counters"]["spec_decode_num_accepted_tokens_per_pos"]
    assert found == accepted_per_position(steps, DRAFTS)
    assert sum(found) > 0.5 * len(steps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_drafts_in_half_precision_are_near_those_in_single_precision(
    dtype: str, drafter: JakiroDrafter, world: World, tmp_path: Path
) -> None:
    prompt, _ = world.texts[0]
    (answer,) = answers(
        tmp_path,
        record=True,
        target=str(world.folder),
        speculative=eagle3(exported(drafter, world.model, tmp_path / "drafter")),
        options={"dtype": dtype},
        batches=[{"prompts": [prompt], "max_tokens": LENGTH}],
    )
    (text,) = answer["texts"]
    text = prompt + text
    target, known, calls = TargetAdapter(world.model), len(prompt), recorded(tmp_path)
    differences, agreed = [], []
    for number in range(len(calls) // DRAFTS):
        chain, log_probs = drafted_chain(drafter, target, text[: known + 1], DRAFTS)
        got = torch.cat(calls[DRAFTS * number : DRAFTS * (number + 1)]).log_softmax(-1)
        drafts = got.argmax(-1).tolist()
        same = [mine == theirs for mine, theirs in zip(chain, drafts, strict=True)]
        agreed.append(all(same))
        follow = text[known + 1 : known + 1 + DRAFTS]
        accepted = [drafted == token for drafted, token in zip(drafts, follow, strict=False)]
        # The rows up to the first draft that differs have the same tokens before them.
        rows = [*same, False].index(False)
        top = [log_probs[row, chain[row]] - got[row, chain[row]] for row in range(rows)]
        differences += [abs(float(difference)) for difference in top]
        known += [*accepted, False].index(False) + 1
    assert sum(agreed) / len(agreed) > 0.7
    assert max(differences) < {"bfloat16": 0.5, "float16": 0.1}[dtype]
