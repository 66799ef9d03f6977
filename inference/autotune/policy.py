"""The draft policies of a decoder, and the numbering of the requests from which they learn.

With `tree="auto"`, each step has no drafts, or the tree that is expected to give the most tokens
per second: (1 + expected accepted candidates) / (seconds to draft and verify). The seconds are
timed once on a machine, where a drafter that is no model takes none, and acceptance rates are
learned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import torch
from transformers import GenerationConfig

from inference.autotune.costs import Costs, costs_with
from inference.autotune.threads import ThreadSwitch, other_threads
from inference.autotune.trees import StepCosts, TreeLearner, tree_arms
from inference.draft_tree import SequenceTree
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.policy import AlwaysDraft, DraftPolicy, RunProgress
from inference.engine.request import Request
from inference.protocol import (
    Budget,
    CostAware,
    Drafter,
    RequestCounter,
    number_of,
    request_counter_of,
)
from inference.sampling.options import Sampling
from inference.trees.shape import TreePlan, Trees
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import num_threads

MOST_LEARNERS = 64  # largest number of kinds of runs whose estimates are kept


class RequestGroup(NamedTuple):
    """Requests that can be decoded together, with the policy that decides how much to draft."""

    requests: list[Request]
    config: GenerationConfig
    policy: DraftPolicy


class AutoTree(DraftPolicy):
    """Selects trees and the number of threads for all requests of a decoder, and learns from them.

    Args:
        trees: the largest trees; None to decode without drafts.
        other_threads: costs with other numbers of threads than the decoder's, by number. If there
            are none, all steps compute with the decoder's number.
        seeded_costs: costs that determine the trees of seeded requests, whatever number of threads
            was fastest when the process started; None for `costs`.
        chains: whether only the best path of each tree is verified.
    """

    def __init__(
        self,
        trees: TreePlan | Budget | None,
        costs: Costs,
        other_threads: Mapping[int, Costs] | None = None,
        seeded_costs: Costs | None = None,
        *,
        chains: bool = False,
    ) -> None:
        self.trees, self.chains = trees, chains
        self.costs_by_threads: dict[int | None, Costs] = {None: costs} | dict(other_threads or {})
        self.seeded_costs = seeded_costs or costs
        self.on_reset: Callable[[], None] | None = None  # forgets what a drafter learned
        self.request_counter = None if trees is None else RequestCounter()
        self._lock = Lock()
        self._learners: dict[object, TreeLearner] = {}  # the most recently used is last
        self._switch = ThreadSwitch(list(self.costs_by_threads))

    def new_run(self, sampling: Sampling, batch: int) -> "AutoRun":
        """Return the policy of a run; runs with the same sampling and batch size share estimates.

        If there are too many kinds of runs, the estimates of the least recently used are dropped.
        """
        costs = [costs.of_batch(batch) for costs in self.costs_by_threads.values()]
        if self.trees is None:
            return AutoRun(None, self._switch, costs, self._lock)
        key = (sampling.description, batch)
        with self._lock:
            learner = self._learners.pop(key, None)
            if learner is None:
                learner = TreeLearner(tree_arms(self.trees, sampling, costs[0], chains=self.chains))
            self._learners[key] = learner
            if len(self._learners) > MOST_LEARNERS:
                del self._learners[next(iter(self._learners))]
        return AutoRun(learner, self._switch, costs, self._lock)

    def reset(self) -> None:
        with self._lock:
            self._learners.clear()
            self._switch = ThreadSwitch(list(self.costs_by_threads))
        if self.on_reset is not None:
            self.on_reset()
        if self.request_counter is not None:
            self.request_counter.reset()

    def reproducible(self, places: int | None = None) -> DraftPolicy:
        """Return a policy with trees that depend only on the measured costs."""
        return AlwaysDraft(None) if self.trees is None else ReproducibleTree(self, places)


class AutoRun(DraftPolicy):
    """Policy of a single run."""

    def __init__(
        self,
        learner: TreeLearner | None,
        switch: ThreadSwitch,
        costs: Sequence[Costs],
        lock: Lock,
    ) -> None:
        self._learner = learner
        self._switch = switch
        arms = () if learner is None else learner.arms
        self._costs = [StepCosts(own, arms) for own in costs]
        self._lock = lock
        self._was_requested = False
        self._index = switch.index  # of the number of threads of the next step

    @property
    def threads(self) -> int | None:
        return self._switch.numbers[self._index]

    def next_budget(self, progress: RunProgress) -> Budget | None:
        if self._learner is None:
            return None
        with self._lock:
            arm = self._learner.choose(progress, self._costs[self._index])
        return None if arm is None else arm.budget

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
        # After steps for which no tree was requested, and after prefill, the drafter also encodes
        # tokens that it has not read yet, so the duration of the step is not typical.
        is_timed = budget is None or self._was_requested
        self._was_requested = budget is not None
        num_nodes = max((len(tree.token_ids) for tree in trees), default=0)
        with self._lock:
            modeled = [costs.verify[min(num_nodes, len(costs.verify) - 1)] for costs in self._costs]
            index = None if self._learner is None else self._learner.index_of(budget)
            if self._learner is not None and index is not None and num_nodes:
                self._learner.learn(index, trees, paths)
                drafting = [costs.draft[index] for costs in self._costs]
                modeled = [sum(parts) for parts in zip(modeled, drafting, strict=True)]
            typical = seconds if is_timed else None
            self._switch.learn(self._index, modeled, typical, is_alone=not num_nodes)
            self._index = self._switch.index


class ReproducibleTree(DraftPolicy):
    """Policy with trees of a single size, or no trees, for sampling with a given seed, and lanes.

    The sampled text depends on the trees, so trees that follow what was learned would give a
    different text for the same seed. The size is the one that is expected to be fastest at assumed
    acceptance rates. If no size is faster than decoding without drafts, nothing is drafted.

    In a lane, whose sequences come and go, sampled trees have the size for a full lane. Greedy text
    does not depend on the trees, so its trees become smaller as more sequences are decoded
    together, each of which makes verification slower.
    """

    def __init__(self, auto: AutoTree, places: int | None = None) -> None:
        self._auto, self._places = auto, places

    def new_run(self, sampling: Sampling, batch: int) -> AlwaysDraft:
        """Return the policy of a run, which learns nothing."""
        assert self._auto.trees is not None, "there are no trees without a drafter"
        if self._places is not None and sampling.do_sample:
            batch = self._places
        costs = self._auto.seeded_costs.of_batch(batch)
        arms = tree_arms(self._auto.trees, sampling, costs, chains=self._auto.chains)
        best, gain = TreeLearner(arms).best(StepCosts(costs, arms))
        return AlwaysDraft(best.budget if gain > 0 else None)


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
        return AutoTree(None, costs, by_threads)
    most = torch.get_num_threads()
    seeded = costs if threads in (None, most) else by_threads.get(most) or measured(most)
    trees: TreePlan | Budget = Budget(drafter.max_nodes, drafter.max_depth)
    if isinstance(drafter, TrainedDrafter | SmallLMDrafter):
        trees = drafter.plan
    policy = AutoTree(trees, costs, by_threads, seeded, chains=target.spec.is_recurrent)
    if isinstance(drafter, CostAware) and costs.draft:
        policy.on_reset = drafter.use_costs(costs.verify_seconds, costs.draft)
    return policy


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
    if is_seeded and requests[0].sampling.do_sample:
        policy = policy.reproducible()
    counters = (request_counter_of(drafter), policy.request_counter)
    tickets = tuple(counter.take() for counter in counters if counter is not None)
    if not tickets:
        return RequestGroup(requests, config, policy)
    index = number_of(tickets)
    sampled = [
        replace(request, sampling=replace(request.sampling, request_index=index), tickets=tickets)
        for request in requests
    ]
    return RequestGroup(sampled, config, policy)
