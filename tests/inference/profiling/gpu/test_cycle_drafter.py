"""The oracle has the tau that was asked for, whatever the trees and the selection of tokens."""

import pytest
import torch
from helpers.workbench import quick_workbench

from inference.draft_tree import ROOT
from inference.engine.captured_run import CapturedRun
from inference.engine.pipeline import PipelinePool
from inference.profiling.gpu.cycle_drafter import fixed_tree
from inference.trees.shape import TreeShape


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tau", [2, 4])
def test_tau_is_exact_and_tokens_follow_the_cycle(
    tau: int, temperature: float, is_drafting: bool
) -> None:
    bench = quick_workbench()
    prompts = bench.prompts(12, 2)
    run = bench.start(bench.oracle(tau, is_drafting=is_drafting), prompts, 40, temperature)
    arm = bench.steps(run, prompts, 3, tau)
    arm.work()
    assert arm.fault() is None
    assert run.stats.tau == tau


def test_tokens_that_are_not_on_the_path_are_wrong_and_siblings_differ() -> None:
    bench = quick_workbench()
    shape = TreeShape(autoregressive_levels=3, parallel_levels=0, children=3, num_nodes=15)
    root = torch.tensor([[5], [6]])
    oracle = bench.oracle(3, is_drafting=False)
    tree = oracle.with_right_tokens(fixed_tree(shape, 2, bench.device), root)
    for sequence, token in enumerate((5, 6)):
        right = bench.cycle.following(token, 3)
        own = tree.sequence_tree(sequence)
        is_right = [own.token_ids[n] == right[own.depth[n] - 1] for n in range(tree.num_nodes)]
        assert sum(is_right) == 2
        for siblings in own.children.values():
            assert len({own.token_ids[node] for node in siblings}) == len(siblings)
        assert own.follow(right) == own.path(is_right.index(True, 1))


def test_sampled_tokens_have_a_probability_in_their_distribution() -> None:
    bench = quick_workbench()
    shape = TreeShape(autoregressive_levels=3, parallel_levels=0, children=3, sampled=True)
    root = torch.tensor([[5]])
    oracle = bench.oracle(2, is_drafting=False)
    own = oracle.with_right_tokens(fixed_tree(shape, 1, bench.device), root).sequence_tree()
    assert ROOT in own.sampled
    for parent, siblings in own.sampled.items():
        ids, probs = own.draft_distribution(parent)
        known = dict(zip(ids.tolist(), probs.tolist(), strict=True))
        assert sum(known.values()) == pytest.approx(1)
        assert all(known[own.token_ids[node]] > 0 for node in siblings)


@pytest.mark.parametrize("is_drafting", [False, True])
def test_the_tokens_of_the_remaining_sequences_stay_right(is_drafting: bool) -> None:
    bench = quick_workbench()
    prompts = bench.prompts(12, 3)
    run = bench.start(bench.oracle(2, is_drafting=is_drafting), prompts, 30)
    first = run.sequences[0].request
    end = bench.cycle.following(prompts[0][-1], 9)[-1]
    first.stop.eos_ids.add(end)  # the first sequence ends early
    run.finish()
    assert len(run.sequences[0].new_token_ids) == 9
    new = [state.new_token_ids for state in run.sequences]
    assert bench.fault(prompts, new) is None


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_steps_give_the_same_tokens_and_tau(is_drafting: bool, temperature: float) -> None:
    bench = quick_workbench()
    prompts = bench.prompts(12, 2)
    oracle = bench.oracle(3, is_drafting=is_drafting)
    run = bench.start(oracle, prompts, 40, temperature, PipelinePool())
    arm = bench.steps(run, prompts, 3, 3)
    arm.work()
    assert isinstance(run, CapturedRun)
    assert run._pipeline is not None
    assert arm.fault() is None
    assert run.stats.tau == 3
