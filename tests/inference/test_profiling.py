"""Decoding on a GPU is measured with an oracle whose tau is exact; here, it runs on a CPU."""

from functools import cache

import pytest
import torch

from inference.profiling import CycleDrafter, GPUProfile, Scale
from inference.trees.shape import TreeShape

QUICK = Scale(
    model={
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
    },
    draft_vocab_size=512,
    tree=TreeShape(autoregressive_levels=3, parallel_levels=1, children=2, breadth=2, num_nodes=14),
    context=24,
    taus=(2, 3),
    batches=(1, 2),
    block=6,
    repeats=2,
)


@cache
def _profile() -> GPUProfile:
    return GPUProfile(QUICK, torch.device("cpu"))


def test_a_quick_run_measures_every_arm_and_checks_its_tokens() -> None:
    rows = list(_profile().rows())
    assert len(rows) == 2 * (1 + 2 * 3)
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert {row["batch"] for row in rows} == {1, 2}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("tau", [2, 4])
def test_tau_is_exact_and_tokens_follow_the_cycle(tau: int, captured: bool) -> None:
    profile = _profile()
    prompts = [[5, 9, 13], [7, 8, 400]]
    drafter = CycleDrafter(profile.drafter, profile.target, QUICK.tree, profile.cycle, tau - 1)
    count = 4 * tau + 1
    run = profile.start(drafter, prompts, count, captured=captured)
    run.finish()
    assert [len(state.new_token_ids) for state in run.sequences] == [count] * 2
    profile.cycle.check(prompts, [state.new_token_ids for state in run.sequences])
    assert run.stats.tau == tau
