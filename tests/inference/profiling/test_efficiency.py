"""Decoding with an oracle is compared with the speed-up that its forward passes allow."""

import pytest
from helpers.models import tiny_drafter, tiny_llama

from inference.profiling.efficiency import OracleTiming, measure_efficiency
from inference.profiling.oracle import OracleDrafter
from inference.profiling.subject import Effort, ProfilingSubject, start
from jakiro.target.adapter import TargetAdapter

# Four tokens per step; verification and drafting take twice as long as a pass over one token.
TIMING = OracleTiming(autoregressive=8.0, oracle=5.0, tau=4.0, target=1.0, verify=1.5, draft=0.5)


def test_the_ideal_speed_up_is_tau_over_the_cost_of_a_step() -> None:
    assert TIMING.speedup == 1.6
    assert TIMING.ideal == 2.0
    assert TIMING._replace(draft=0.0, verify=1.0).ideal == TIMING.tau


def test_a_run_without_any_time_between_forward_passes_is_ideal() -> None:
    steps = 10
    oracle = steps * (TIMING.verify + TIMING.draft)
    alone = steps * TIMING.tau * TIMING.target
    perfect = TIMING._replace(oracle=oracle, autoregressive=alone)
    assert perfect.speedup == pytest.approx(perfect.ideal)


def test_the_efficiency_is_a_share_of_the_ideal_with_its_parts() -> None:
    target = TargetAdapter(tiny_llama())
    subject = ProfilingSubject(target, tiny_drafter(target), [[1, 2, 3]], Effort(1, 8, 1))
    (figure,) = measure_efficiency(subject).values()
    details = figure.details
    assert details["tau"] == 4
    share = details["speedup"]["value"] / details["ideal"]["value"]
    assert figure.interval.value == pytest.approx(share)
    assert details["milliseconds"].keys() == {"target", "verify", "draft"}


@pytest.mark.parametrize(("num_right", "num_nodes"), [(3, 8), (1, 2), (2, 7)])
def test_an_oracle_has_as_many_accepted_drafts_as_requested(num_right: int, num_nodes: int) -> None:
    target = TargetAdapter(tiny_llama())
    prompts = [[1, 2, 3], [4, 5]]
    known = [start(target, None, [ids], 40).finish().token_ids for ids in prompts]
    oracle = OracleDrafter(known, 61, target.device, num_right, num_nodes)
    count = 5 * (num_right + 1) + 1
    run = start(target, oracle, prompts, count).finish()
    assert run.stats.tau == num_right + 1
    for one, ids, all_ids in zip(run.sequences, prompts, known, strict=True):
        assert one.token_ids == all_ids[: len(ids) + count]
