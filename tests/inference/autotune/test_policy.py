"""The policy is determined by drafter and choice of trees; only trained drafters have shapes."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.tables import no_processors

from inference.autotune.costs import Costs
from inference.autotune.policy import AutoTree, ReproducibleTree, policy_for
from inference.autotune.trees import StepCosts, TreeLearner, tree_arms
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.policy import AlwaysDraft, RunProgress
from inference.protocol import Budget
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter


def test_only_automatic_trees_are_chosen_by_costs() -> None:
    target, drafter = TargetAdapter(tiny_llama()), LookupDrafter()
    fixed = policy_for(target, drafter, "fixed", None)
    assert isinstance(fixed, AlwaysDraft)
    assert fixed.budget == Budget(drafter.max_nodes)
    alone = policy_for(target, None, "auto", None)
    assert isinstance(alone, AlwaysDraft)
    assert alone.budget is None
    automatic = policy_for(target, drafter, "auto", 1)
    assert isinstance(automatic, AutoTree)
    assert automatic.trees == Budget(drafter.max_nodes, drafter.max_depth)
    assert not automatic.costs_by_threads[None].draft


def test_the_costs_of_a_small_language_model_include_its_passes() -> None:
    model = tiny_llama()
    target, small = TargetAdapter(model), SmallLMDrafter(tiny_llama(seed=1), model)
    automatic = policy_for(target, small, "auto", None)
    assert isinstance(automatic, AutoTree)
    assert automatic.trees == small.plan
    assert sorted(automatic.costs_by_threads[None].draft) == [1, 2, 3]
    costs = automatic.costs_by_threads[None]
    for do_sample in (False, True):
        arms = tree_arms(small.plan, no_processors(do_sample=do_sample), costs)
        for arm in arms:
            assert arm.shape is not None
            assert arm.drafting(costs) > 0
        assert max(arm.shape.max_nodes for arm in arms if arm.shape) == small.max_nodes
    lanes = automatic.reproducible(2)
    assert isinstance(lanes, ReproducibleTree)
    assert lanes._auto.costs_by_threads[None].draft
    pair = CombinedDrafter(small, LookupDrafter())
    together = policy_for(target, pair, "auto", None)
    assert isinstance(together, AutoTree)
    assert set(together.costs_by_threads[None].draft) == set(automatic.costs_by_threads[None].draft)
    assert pair.cascade(False, small.plan.greedy) is not None


def test_the_tree_size_for_a_full_batch_is_chosen_by_the_costs_of_that_batch() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target), target, TreeShape())
    automatic = policy_for(target, drafter, "auto", None)
    assert isinstance(automatic, AutoTree)
    fixed = automatic.reproducible(4)
    assert isinstance(fixed, ReproducibleTree)
    assert fixed._auto.trees == automatic.trees
    costs = automatic.costs_by_threads[None].of_batch(4)
    arms = tree_arms(automatic.trees, no_processors(), costs)
    budget = fixed.new_run(no_processors(), 1).next_budget(RunProgress())
    best, gain = TreeLearner(arms).best(StepCosts(costs, arms))
    assert budget == (best.budget if gain > 0 else None)
    always = policy_for(target, drafter, "fixed", None)
    assert always.reproducible(4) is always


def test_the_number_of_threads_may_change_only_where_bits_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    target = TargetAdapter(tiny_llama())

    def numbers(threads: int | None, *, may_change: bool = True) -> set[int]:
        policy = policy_for(target, LookupDrafter(), "auto", threads, adapts=may_change)
        assert isinstance(policy, AutoTree)
        return {number for number in policy.costs_by_threads if number is not None}

    assert numbers(2) == {1}
    assert numbers(1) == {2}
    assert numbers(None) == numbers(2, may_change=False) == set()
    target.modules.is_batch_invariant = True
    assert numbers(2) == set()


def test_trees_of_seeded_requests_do_not_depend_on_the_chosen_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def costs_with(*_: object) -> Costs:
        return Costs(verify={0: 1.0, 48: 1.0 + torch.get_num_threads()}, draft={1: 0.1, 2: 0.2})

    monkeypatch.setattr("inference.autotune.policy.costs_with", costs_with)
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target), target, TreeShape())
    most = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        policies = [
            policy_for(target, drafter, "auto", own, adapts=True) for own in (None, 1, 2, 3)
        ]
    finally:
        torch.set_num_threads(most)
    chosen = []
    for policy in policies:
        assert isinstance(policy, AutoTree)
        run = policy.reproducible().new_run(no_processors(), 1)
        chosen.append((policy.seeded_costs, run.next_budget(RunProgress())))
    assert chosen == [chosen[0]] * 4


def test_servers_and_samples_with_a_seed_keep_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    policy = policy_for(TargetAdapter(tiny_llama()), None, "auto", 2, adapts=True)
    assert isinstance(policy, AutoTree)
    assert list(policy.costs_by_threads) == [None, 1]
    for fixed in (policy.reproducible(), policy.reproducible(4)):
        assert isinstance(fixed, AlwaysDraft)
        assert fixed.budget is fixed.threads is None
