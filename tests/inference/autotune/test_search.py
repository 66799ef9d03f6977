"""Trees are selected by measured costs and recorded acceptance."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from transformers import LogitsProcessorList

from inference.autotune.costs import Costs
from inference.autotune.search import (
    RecordingDrafter,
    StepRecord,
    choose_plan,
    expected_tau,
)
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.generation.preparation import prepare_requests
from inference.protocol import Budget
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

COSTS = Costs(verify={0: 1.0, 4: 2.0, 8: 4.0}, draft={1: 0.5, 2: 1.0})


def test_the_ceiling_counts_verification_and_drafting() -> None:
    shape = TreeShape(autoregressive_levels=2, parallel_levels=0, num_nodes=4)
    assert COSTS.ceiling(shape, tau=3.0) == pytest.approx(3.0 / (2.0 + 1.0))
    assert COSTS.ceiling(None, tau=1.0) == pytest.approx(1.0)


def test_a_record_gives_the_tau_of_every_smaller_tree() -> None:
    steps = [StepRecord([0, 5]), StepRecord([3]), StepRecord([])]
    taus = [expected_tau(steps, num_nodes) for num_nodes in (1, 4, 6)]
    assert taus == pytest.approx([4 / 3, 5 / 3, 6 / 3])


def test_recorded_ranks_reproduce_tau() -> None:
    model = tiny_llama(vocab=11)
    target = TargetAdapter(model)
    shape = TreeShape(children=4, breadth=3, num_nodes=12)
    recorder = RecordingDrafter(TrainedDrafter(tiny_drafter(target), target, shape))
    requests, _ = prepare_requests(
        model, [[1, 2, 3]], {"max_new_tokens": 60}, temperature=0.0, seed=0, max_position=128
    )
    run = DecodeRun(target, recorder, requests)
    steps = list(run)
    accepted = sum(len(record.ranks) for record in recorder.records)
    emitted = sum(len(tokens.token_ids) - 1 for (tokens,) in steps[1:])  # the last step may be cut
    assert 0 < emitted <= accepted <= emitted + shape.depth
    assert all(record.ranks == sorted(record.ranks) for record in recorder.records)


def test_trees_are_selected_and_expected_speed_follows_from_costs() -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    drafter = tiny_drafter(target)
    choice = choose_plan(target, drafter, [[1, 2, 3]], max_new_tokens=12)
    assert not choice.plan.greedy.sampled
    assert choice.plan.sampling.sampled
    autoregressive = choice.costs.ceiling(None, 1.0)
    for rated in (choice.greedy, choice.sampling):
        speedup = choice.costs.ceiling(rated.shape, rated.tau) / autoregressive
        assert rated.speedup == pytest.approx(speedup)


def test_deterministic_trees_can_be_rated_where_tokens_are_sampled() -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    drafter = tiny_drafter(target)
    costs = Costs(verify={0: 1.0, 24: 1.0}, draft={1: 0.1, 2: 0.1, 3: 9.0})
    choice = choose_plan(
        target, drafter, [[1, 2, 3], [4]], max_new_tokens=12, sampled=False, costs=costs
    )
    assert choice.costs == costs
    assert not choice.plan.sampling.sampled
    # Nodes are free here, and a third pass is very slow.
    for rated in (choice.greedy, choice.sampling):
        assert rated.shape.autoregressive_levels < 3
        assert rated.tau > 1


def test_there_is_a_sampled_tree_for_many_parallel_levels() -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    drafter = tiny_drafter(target, tiny_settings(parallel_levels=7))
    costs = Costs(verify={0: 1.0, 24: 1.0}, draft={1: 0.1, 2: 0.1, 3: 0.1})
    plan = choose_plan(target, drafter, [[1, 2, 3]], max_new_tokens=6, costs=costs).plan
    assert plan.sampling.sampled
    assert plan.sampling.parallel_levels == 7


def test_a_smaller_budget_samples_fewer_nodes_and_never_cuts_sampled_nodes() -> None:
    target = TargetAdapter(tiny_llama())
    shape = TreeShape(children=3, breadth=2, sampled=True)
    drafter = TrainedDrafter(tiny_drafter(target), target, shape)
    session = drafter.new_session(Sampling(LogitsProcessorList(), do_sample=True), 32)
    session.root = torch.tensor([[4]])
    sizes = []
    for num_nodes in (shape.max_nodes, shape.max_nodes - 1, 5, 2):
        tree = session.propose(Budget(num_nodes), StepRandom([(0,)]))
        sizes.append(tree.num_nodes)
        assert tree.num_nodes <= num_nodes
        for siblings in tree.sequence_tree().sampled.values():  # all of them, in order
            ranks = [int(tree.rank[0, node]) for node in siblings]
            assert ranks == list(range(len(ranks)))
    assert sizes == [15, 10, 3, 0]
