"""The draft policy and the tree shapes of a decoder, and the numbering of its requests."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from inference.autotune.auto_threads import AutoThreads
from inference.autotune.costs import Costs, costs_with
from inference.autotune.online import AutoTree, LaneTrees
from inference.autotune.search import largest_trees
from inference.autotune.threads import other_threads
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.policy import AlwaysDraft, DraftPolicy
from inference.engine.request import Request
from inference.engine.threads import num_threads
from inference.protocol import Budget, CostAware, Drafter, number_of, request_counter_of
from inference.trees.shape import TreePlan, Trees, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter


class RequestGroup(NamedTuple):
    """Requests that can be decoded together, with the policy that decides how much to draft."""

    requests: list[Request]
    config: GenerationConfig
    policy: DraftPolicy


def policy_for(
    target: TargetAdapter,
    drafter: Drafter | None,
    tree: Trees,
    threads: int | None,
    *,
    adapts: bool = False,
) -> DraftPolicy:
    """Return the policy of a decoder; with "auto", a few steps are timed.

    Args:
        adapts: whether steps may compute with another number of threads when that becomes faster.
            They never do if the target is compiled, or computes the same bits in every step.
    """
    has_fixed_bits = target.modules.is_batch_invariant or target.is_compiled
    numbers = other_threads(threads) if adapts and not has_fixed_bits else []
    is_learned = bool(numbers) if drafter is None else tree == "auto"
    if not is_learned:
        return AlwaysDraft.with_all_of(drafter)

    def measured(number: int | None) -> Costs:
        with num_threads(number):
            return costs_with(target, drafter)

    costs, by_threads = measured(threads), {number: measured(number) for number in numbers}
    if drafter is None:
        return AutoThreads(costs, by_threads)
    most = torch.get_num_threads()
    seeded = costs if threads in (None, most) else by_threads.get(most) or measured(most)
    shared: dict[str, Any] = {"other_threads": by_threads, "seeded_costs": seeded}
    if isinstance(drafter, TrainedDrafter | SmallLMDrafter):
        return AutoTree(drafter.plan, costs, **shared)
    if isinstance(drafter, CostAware) and costs.draft:
        shared["on_reset"] = drafter.use_costs(costs.verify_seconds, costs.draft)
    return AutoTree(Budget(drafter.max_nodes, drafter.max_depth), costs, **shared)


def fixed_policy(policy: DraftPolicy, places: int) -> DraftPolicy:
    """Return a policy with trees whose size is not learned.

    Instead of trees whose size is selected in each step by what was learned, these trees have the
    size that is expected to be fastest, for sampling in a full batch and for greedy decoding with
    each number of sequences.
    """
    if isinstance(policy, AutoThreads):
        return policy.reproducible()
    return LaneTrees(policy, places) if isinstance(policy, AutoTree) else policy


def shapes_of(drafter: JakiroDrafter, tree: Trees) -> TreeShape | TreePlan | None:
    """Return the trees of a trained drafter; None for trees with as many levels as in training."""
    if tree == "auto":
        return largest_trees(drafter)
    return None if isinstance(tree, str) else tree


def refuse_shape(tree: Trees) -> None:
    """Raise an error if `tree` is a shape or a plan, which only trained drafters have."""
    if not isinstance(tree, str):
        raise ConfigError(
            "only the trees of a trained drafter have a shape",
            expected='tree="auto" or tree="fixed" for this drafter',
            got=tree,
            remedy="set num_nodes and depth in the drafter's settings",
        )


def numbered(
    requests: list[Request],
    config: GenerationConfig,
    drafter: Drafter | None,
    policy: DraftPolicy,
    *,
    is_seeded: bool,
) -> RequestGroup:
    """Return the requests with their policy.

    The requests are numbered if the drafter or the policy learns from requests. The random numbers
    of a request depend on its number. Otherwise, candidates could be accepted or rejected by the
    same random numbers from which drafts or tree sizes were learned earlier.

    Args:
        is_seeded: whether the caller gave a seed; if tokens are sampled, the sizes of the trees are
            then not learned.
    """
    if is_seeded and requests[0].sampling.do_sample and isinstance(policy, AutoTree | AutoThreads):
        policy = policy.reproducible()
    counters = (request_counter_of(drafter), policy.request_counter)
    tickets = tuple(counter.take() for counter in counters if counter is not None)
    if not tickets:
        return RequestGroup(requests, config, policy)
    index = number_of(tickets)
    several = [
        replace(request, sampling=replace(request.sampling, request_index=index), tickets=tickets)
        for request in requests
    ]
    return RequestGroup(several, config, policy)
