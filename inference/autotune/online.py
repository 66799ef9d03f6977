"""`tree="auto"`: how much to draft in each round, by measured costs and acceptance seen so far.

Every round chooses between a plain decoding step and trees of several sizes by expected tokens per
second: (1 + expected accepted candidates) / (seconds to draft and verify). Costs are measured once
per machine, target and drafter, and corrected by the rounds' own durations. Acceptance is a running
estimate for every place in a tree; smaller trees are made of the first places of larger ones, so
each round teaches about all of them. Where drafting does not pay, decoding goes on plainly and
tries again after a pause, which doubles each time.
"""

from collections.abc import Sequence
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import LogitsProcessorList

from inference.autotune.costs import Costs
from inference.draft_tree import SequenceTree
from inference.protocol import Budget, RequestCounter
from inference.sampling import PREFIX_FREE, Sampling
from inference.trees.shape import TreePlan, TreeShape

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
FIRST_TREE = 8  # nodes of the tree that is tried while nothing is known
DOUBT = 4.0  # rounds of imagined experience, in which drafting just pays
MEMORY = 256  # rounds after which an observation weighs 1/e
MEMORY_OF_TIMES = 20  # the same for seconds, which change faster
FIRST_TRIAL, LATER_TRIAL = 4, 2  # rounds that are drafted before drafting is judged
SHORTEST_PAUSE, LONGEST_PAUSE = 192, 3072  # plain rounds before drafting is tried again
EXPLORE_EVERY = 32  # drafted rounds between trees of the largest size, and between plain steps

Place = tuple[int, int, int]


class Arm(NamedTuple):
    """One size of tree."""

    budget: Budget
    shape: TreeShape
    block: Place  # its candidates take the places below this one in all three coordinates
    seconds: float  # to draft and verify it, by the cost model

    def places(self, tree: SequenceTree, path: Sequence[int]) -> list[Place]:
        """Return where in the tree the nodes of a path stand.

        A drawn candidate's place is its depth, its parent's among the expanded nodes, and its turn
        among its siblings; a chosen one's is its depth and its rank by score among all.
        """
        if not self.shape.sampled:
            return [(tree.depth[node] - 1, tree.rank[node], 0) for node in path]
        children = self.shape.children
        first = [0, *accumulate(self.shape.level_sizes)]
        return [
            (depth, (node - first[depth]) // children, (node - first[depth]) % children)
            for depth, node in enumerate(path)
        ]


class AutoTree:
    """Chooses trees for all requests of a decoder; learns from every one of them.

    Args:
        plan: the largest trees, of greedy and of random decoding.
        costs: of target and drafter on this machine.
    """

    def __init__(self, plan: TreePlan, costs: Costs) -> None:
        self.plan = plan
        self.costs = costs
        self.request_counter = RequestCounter()
        self._lock = Lock()
        self._learners: dict[object, _Learner] = {}

    def new_run(self, sampling: Sampling, batch: int) -> "AutoRun":
        """Return the policy of a run; runs that sample alike learn together."""
        key = (sampling.do_sample, _described(sampling.processors), batch)
        with self._lock:
            if key not in self._learners:
                arms = _arms(self.plan.shape(sampling), self.costs)
                self._learners[key] = _Learner(arms, self.costs.verify_seconds(0))
        return AutoRun(self._learners[key], self._lock)

    def reset(self) -> None:
        """Forget what was learnt from earlier runs."""
        with self._lock:
            self._learners.clear()
        self.request_counter.reset()


class AutoRun:
    """The decisions of one run."""

    def __init__(self, learner: "_Learner", lock: Lock) -> None:
        self._learner = learner
        self._lock = lock
        self._arm: Arm | None = None
        self._was_drafted = False

    def next_budget(self) -> Budget | None:
        """Return the limits of the next round's trees, or None for a plain decoding step."""
        with self._lock:
            self._arm = self._learner.choose()
        return None if self._arm is None else self._arm.budget

    def learn(
        self, trees: Sequence[SequenceTree], paths: Sequence[list[int]], seconds: float
    ) -> None:
        """Take in what became of the last round."""
        arm = self._arm if any(tree.token_ids for tree in trees) else None
        pairs = zip(trees, paths, strict=True)
        places = [place for tree, path in pairs for place in arm.places(tree, path)] if arm else []
        # After plain steps or the prompt a drafted round also encodes what the drafter has missed:
        # its time tells nothing of the others.
        is_timed = arm is None or self._was_drafted
        self._was_drafted = arm is not None
        with self._lock:
            self._learner.learn(arm, places, len(trees), seconds if is_timed else None)


class _Learner:
    """What is known about one way of sampling.

    Args:
        arms: the trees to choose from, the largest last.
        plain_seconds: of a plain step, by the cost model.
    """

    def __init__(self, arms: Sequence[Arm], plain_seconds: float) -> None:
        self.arms = arms
        self.plain_seconds = plain_seconds
        self.seconds = np.array([arm.seconds for arm in arms])
        self.corners = tuple(np.array([arm.block for arm in arms]).T - 1)
        largest = [max(arm.block[axis] for arm in arms) for axis in range(3)]
        self.accepted: NDArray[np.float64] = np.zeros(largest)
        self.offered: NDArray[np.float64] = np.zeros(largest)
        self.slowness = _Slowness(len(arms))
        self.num_drafted = 0
        self.left_of_pause = 2  # plain steps to begin with, to know what they take
        self.left_of_trial = FIRST_TRIAL
        self.pause = SHORTEST_PAUSE
        small = [arm for arm in arms if arm.shape.max_nodes <= FIRST_TREE]
        self.best = small[-1] if small else arms[0]

    def choose(self) -> Arm | None:
        """Return the next round's tree, or None for a plain step."""
        if self.left_of_pause > 0:
            return None
        is_exploring = self.num_drafted % EXPLORE_EVERY == EXPLORE_EVERY - 1
        return self.arms[-1] if is_exploring else self.best

    def learn(
        self, arm: Arm | None, places: Sequence[Place], batch: int, seconds: float | None
    ) -> None:
        """Take in a round and decide how to go on; without seconds where they tell nothing."""
        if arm is None:
            if seconds is not None:
                self.slowness.take_plain(seconds / self.plain_seconds)
            self.left_of_pause = max(0, self.left_of_pause - 1)
            return
        if seconds is not None:
            self.slowness.take(self.arms.index(arm), seconds / arm.seconds)
        self.num_drafted += 1
        self.left_of_trial -= 1
        self._count(arm, places, batch)
        values = self._values()
        best = int(values.argmax())
        if values[best] > self._plain_value():
            self.best, self.pause = self.arms[best], SHORTEST_PAUSE
            if self.num_drafted % EXPLORE_EVERY == 0:
                self.left_of_pause = 1
        elif self.left_of_trial <= 0:
            self.left_of_pause, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.left_of_trial = LATER_TRIAL

    def _count(self, arm: Arm, places: Sequence[Place], batch: int) -> None:
        self.accepted *= 1 - 1 / MEMORY
        self.offered *= 1 - 1 / MEMORY
        depth, width, turns = arm.block
        self.offered[:depth, :width, :turns] += batch
        for place in places:
            self.accepted[place] += 1

    def _values(self) -> NDArray[np.float64]:
        """Return each arm's expected tokens per second; without experience a plain step's."""
        seconds = self.seconds * self.slowness.of_arms
        rates = self.accepted / np.maximum(self.offered, 1.0)
        seen = rates.cumsum(0).cumsum(1).cumsum(2)[self.corners]
        experience = self.offered[self.corners]
        just_pays = seconds * self._plain_value() - 1
        expected = (seen * experience + just_pays * DOUBT) / (experience + DOUBT)
        return np.asarray((1 + expected) / seconds)

    def _plain_value(self) -> float:
        return 1 / (self.plain_seconds * self.slowness.of_plain)


class _Slowness:
    """Real over modelled seconds: the cost model knows no batch, no long context, no busy machine.

    What was not timed yet is assumed to be as slow as what was.
    """

    def __init__(self, num_arms: int) -> None:
        self._arms = np.full(num_arms, np.nan)
        self._counts = np.zeros(num_arms + 1)
        self._overall = 1.0
        self._plain = np.nan

    @property
    def of_arms(self) -> NDArray[np.float64]:
        """Of every tree."""
        return np.where(np.isnan(self._arms), self._overall, self._arms)

    @property
    def of_plain(self) -> float:
        """Of a plain step."""
        return self._overall if np.isnan(self._plain) else self._plain

    def take(self, arm: int, ratio: float) -> None:
        """Take in a drafted round."""
        self._counts[arm] += 1
        self._arms[arm] = _moved(self._arms[arm], ratio, self._counts[arm])
        self._overall = float(np.nanmean(self._arms))

    def take_plain(self, ratio: float) -> None:
        """Take in a plain step."""
        self._counts[-1] += 1
        self._plain = _moved(self._plain, ratio, self._counts[-1])


def _moved(mean: float, value: float, count: float) -> float:
    """Return the mean of `count` values, moving with the last ones once there are many.

    An outlier (a busy machine) counts twofold at most.
    """
    if np.isnan(mean):
        return value
    return mean + max(1 / count, 1 / MEMORY_OF_TIMES) * (min(value, 2 * mean) - mean)


def _arms(shape: TreeShape, costs: Costs) -> list[Arm]:
    """Return the sizes of trees worth telling apart, the largest last."""
    arms: dict[Place, Arm] = {}
    for depth in range(1, shape.depth + 1):
        for num_nodes in NODE_COUNTS:
            budget = Budget(num_nodes, depth)
            cut = shape.within(budget)
            if cut is None or cut.autoregressive_levels not in costs.draft:
                continue
            seconds = costs.verify_seconds(cut.max_nodes) + costs.draft[cut.autoregressive_levels]
            block = (cut.depth, cut.max_nodes, 1)
            if cut.sampled:
                block = (cut.depth, cut.breadth if cut.depth > 1 else 1, cut.children)
            arms.setdefault(block, Arm(budget, cut, block, seconds))
    return sorted(arms.values(), key=lambda arm: (arm.shape.max_nodes, arm.shape.depth))


def _described(processors: LogitsProcessorList) -> tuple[str, ...]:
    """Return what tells one way of shaping laws from another."""
    return tuple(
        f"{type(one).__name__}{sorted(vars(one).items())}"
        if type(one) in PREFIX_FREE
        else type(one).__name__
        for one in processors
    )
