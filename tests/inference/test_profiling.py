"""Decoding on a GPU is measured with an oracle whose tau is exact; here, it runs on a CPU."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.commands import exit_code

from inference.profiling import QUICK, CycleDrafter, GPUProfile


@cache
def _profile() -> GPUProfile:
    return GPUProfile(QUICK, torch.device("cpu"))


def test_a_quick_run_measures_every_arm_and_checks_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert exit_code("profile", "gpu", "--quick", "--device", "cpu", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
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
