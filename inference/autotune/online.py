"""Selection of the size of the draft tree in each decoding step, for `tree="auto"`.

Each decoding step has either no drafts or a tree of a certain size, whichever is expected to give
the most tokens per second: (1 + expected accepted candidates) / (seconds to draft and verify).
Costs are measured once per machine, target and drafter, and corrected by the durations of decoding
steps. An acceptance rate is estimated for every node position in a tree. Smaller trees consist of
the first positions of larger trees, so each decoding step improves the estimates for all sizes. If
drafting does not make decoding faster, decoding continues without drafts. Drafting is tried again
after a pause, and each further pause is twice as long.
"""

from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from inference.autotune.arms import NodePosition, Slowness, TreeArm, tree_arms
from inference.autotune.costs import Costs
from inference.draft_tree import SequenceTree
from inference.engine.policy import AlwaysDraft
from inference.protocol import Budget, RequestCounter
from inference.rates import FadingRates
from inference.sampling.options import Sampling
from inference.trees.shape import TreePlan

FIRST_TREE = 8  # largest number of nodes of the trees before any observation
DOUBT = 4.0  # weight, in verified trees, of the prior that drafting is as fast as not drafting
MEMORY = 256.0  # number of later trees after which the weight of a tree has dropped to 1/e
# numbers of decoding steps with drafts before drafting may pause: at the start, and after a pause
FIRST_TRIAL, LATER_TRIAL = 8, 4
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 3072  # decoding steps without drafts before the next trial
# number of drafted steps after which the largest tree and a step without drafts are tried
EXPLORE_EVERY = 32
MOST_LEARNERS = 64  # largest number of kinds of runs whose estimates are kept
# If this many drafted steps in a row take this many times as long as expected, the load of the
# machine has changed, and steps without drafts are timed again.
SURPRISES, SURPRISING = 3, 1.5


class AutoTree:
    """Selects trees for all requests of a decoder, and learns from all of them.

    Args:
        trees: the largest trees: their shapes for a drafter that is a model, or their limits for a
            drafter of any other kind.
        costs: costs of target and drafter on this machine.
        on_reset: function that is called when what was learned about trees is discarded.
    """

    def __init__(
        self,
        trees: TreePlan | Budget,
        costs: Costs,
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self.trees = trees
        self.costs = costs
        self._on_reset = on_reset
        self.request_counter = RequestCounter()
        self._lock = Lock()
        self._learners: dict[object, _Learner] = {}  # the most recently used is last

    def new_run(self, sampling: Sampling, batch: int) -> "AutoRun":
        """Return the policy of a run; runs with the same sampling and batch size share estimates.

        If there are too many kinds of runs, the estimates of the least recently used are dropped.

        Args:
            sampling: options by which tokens are selected.
            batch: number of sequences.
        """
        key = (sampling.description, batch)
        with self._lock:
            learner = self._learners.pop(key, None)
            if learner is None:
                arms = tree_arms(self.trees, sampling, self.costs)
                learner = _Learner(arms, self.costs.verify_seconds(0))
            self._learners[key] = learner
            if len(self._learners) > MOST_LEARNERS:
                del self._learners[next(iter(self._learners))]
        return AutoRun(learner, self._lock)

    def reset(self) -> None:
        """Discard everything learned from earlier runs."""
        with self._lock:
            self._learners.clear()
        self._on_reset()
        self.request_counter.reset()

    def reproducible(self) -> "ReproducibleTree":
        """Return a policy with trees that depend only on the measured costs."""
        return ReproducibleTree(self)


class ReproducibleTree:
    """Policy with trees of a single size, or no trees, for sampling with a given seed.

    The sampled text depends on the trees, so trees that follow the durations of decoding steps
    would give a different text for the same seed. The size is the one that is expected to be
    fastest at assumed acceptance rates. If no size is faster than decoding without drafts, nothing
    is drafted.

    Args:
        auto: policy whose trees and costs are used.
    """

    request_counter: RequestCounter | None = None

    def __init__(self, auto: AutoTree) -> None:
        self._auto = auto

    def new_run(self, sampling: Sampling, batch: int) -> AlwaysDraft:
        """Return the policy of a run, which learns nothing.

        Args:
            sampling: options by which tokens are selected.
            batch: number of sequences, which makes no difference.
        """
        costs = self._auto.costs
        arms = tree_arms(self._auto.trees, sampling, costs)
        best = max(arms, key=lambda arm: arm.assumed_tau / arm.seconds)
        pays = best.assumed_tau / best.seconds > 1 / costs.verify_seconds(0)
        return AlwaysDraft(best.budget if pays else None)

    def reset(self) -> None:
        """Do nothing, because nothing was learned."""


class LaneTrees(ReproducibleTree):
    """Policy of a lane, whose sequences come and go.

    If any sequence samples, trees have the size that is expected to be fastest for a full lane,
    because sampled text depends on the trees. Greedy text does not, so its trees may become smaller
    as more sequences are decoded together, each of which makes verification slower.

    Args:
        full: policy whose trees are used, with the costs of a full lane.
        one: costs of a single sequence; those of other numbers are interpolated.
        places: number of sequences of a full lane.
    """

    def __init__(self, full: AutoTree, one: Costs, places: int) -> None:
        super().__init__(full)
        self.one = one
        self.places = places

    def new_run(self, sampling: Sampling, batch: int) -> AlwaysDraft:
        """Return the policy of decoding steps, which learns nothing.

        Args:
            sampling: options by which tokens are selected.
            batch: number of sequences that are decoded together.
        """
        if sampling.do_sample or batch >= self.places:
            return super().new_run(sampling, batch)
        share = (batch - 1) / (self.places - 1)
        costs = self.one.between(self._auto.costs, share)
        return AutoTree(self._auto.trees, costs).reproducible().new_run(sampling, batch)


class AutoRun:
    """Policy of a single run.

    Args:
        learner: estimates that the run shares with other runs.
        lock: lock of the estimates.
    """

    def __init__(self, learner: "_Learner", lock: Lock) -> None:
        self._learner = learner
        self._lock = lock
        self._was_requested = False

    @property
    def autoregressive_seconds(self) -> float:
        """The estimated seconds of a decoding step without drafts."""
        with self._lock:
            return self._learner.autoregressive_seconds

    def next_budget(self) -> Budget | None:
        """Return the limits of the next step's trees; None for a step without drafts."""
        with self._lock:
            arm = self._learner.choose()
        return None if arm is None else arm.budget

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
        """Learn from a decoding step.

        Args:
            trees: verified trees, one per sequence.
            paths: accepted nodes of each sequence.
            seconds: duration of the step; None if it is not typical.
            budget: limits of the trees; None for a step without drafts.
        """
        arm = self._learner.arm_of(budget) if any(tree.token_ids for tree in trees) else None
        pairs = zip(trees, paths, strict=True)
        positions = (
            [position for tree, path in pairs for position in arm.positions(tree, path)]
            if arm
            else []
        )
        # After steps for which no tree was requested, and after prefill, the drafter also encodes
        # tokens that it has not read yet, so the duration of the step is not typical.
        is_timed = arm is None or self._was_requested
        self._was_requested = budget is not None
        with self._lock:
            self._learner.learn(arm, positions, len(trees), seconds if is_timed else None)


class _Learner:
    """Estimates for all runs with the same sampling and batch size.

    Args:
        arms: sizes of trees to select from, the largest last.
        modeled_seconds: seconds of a step without drafts, according to the cost model.
    """

    def __init__(self, arms: Sequence[TreeArm], modeled_seconds: float) -> None:
        self.arms = arms
        self.modeled_seconds = modeled_seconds
        self.seconds = np.array([arm.seconds for arm in arms])
        self.corners = tuple(np.array([arm.block for arm in arms]).T - 1)
        depth, width, children = (max(arm.block[axis] for arm in arms) for axis in range(3))
        self.acceptance = FadingRates((depth, width, children), MEMORY)
        self.slowness = Slowness(len(arms))
        self.num_drafted = self.num_surprises = 0
        self.left_of_pause = 2  # decoding starts with two steps without drafts, to time such steps
        self.left_of_trial = FIRST_TRIAL
        self.pause = SHORTEST_PAUSE
        small = [arm for arm in arms if arm.budget.num_nodes <= FIRST_TREE]
        self.best = small[-1] if small else arms[0]

    def arm_of(self, budget: Budget | None) -> TreeArm | None:
        """Return the size with these limits; None for a step without drafts."""
        return next((arm for arm in self.arms if arm.budget == budget), None)

    def choose(self) -> TreeArm | None:
        """Return the size of the next step's trees; None for a step without drafts."""
        if self.left_of_pause > 0:
            return None
        is_exploring = self.num_drafted % EXPLORE_EVERY == EXPLORE_EVERY - 1
        return self.arms[-1] if is_exploring else self.best

    def learn(
        self,
        arm: TreeArm | None,
        positions: Sequence[NodePosition],
        batch: int,
        seconds: float | None,
    ) -> None:
        """Learn from a decoding step and decide on the next steps.

        Args:
            arm: size of the verified trees; None for a step without drafts.
            positions: positions of all accepted nodes.
            batch: number of sequences.
            seconds: duration of the step; None if the duration is not typical.
        """
        if arm is None:
            if seconds is not None:
                self.slowness.take_autoregressive(seconds / self.modeled_seconds)
            self.left_of_pause = max(0, self.left_of_pause - 1)
            return
        if seconds is not None:
            self._time(self.arms.index(arm), seconds / arm.seconds)
        self.num_drafted += 1
        self.left_of_trial -= 1
        self._count(arm, positions, batch)
        values = self._values()
        best = int(values.argmax())
        if values[best] > self._autoregressive_value():
            self.best, self.pause = self.arms[best], SHORTEST_PAUSE
            if self.num_drafted % EXPLORE_EVERY == 0:
                self.left_of_pause = 1
        elif self.left_of_trial <= 0:
            self.left_of_pause, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.left_of_trial = LATER_TRIAL

    def _time(self, index: int, ratio: float) -> None:
        """Learn from the ratio of measured to modeled seconds of a drafted step."""
        is_surprising = ratio > SURPRISING * self.slowness.of_arms[index]
        self.num_surprises = self.num_surprises + 1 if is_surprising else 0
        self.slowness.take(index, ratio)
        if self.num_surprises == SURPRISES:
            self.num_surprises, self.left_of_pause = 0, 2
            self.slowness.expect_change()

    def _count(self, arm: TreeArm, positions: Sequence[NodePosition], batch: int) -> None:
        accepted, offered = np.zeros((2, *self.acceptance.shape))
        depth, width, children = arm.block
        offered[:depth, :width, :children] = batch
        for position in positions:
            accepted[position] += 1
        self.acceptance.add(accepted, offered)

    def _values(self) -> NDArray[np.float64]:
        """Return the expected tokens per second of each size.

        Before any observation, each size is expected to be as fast as decoding without drafts.
        """
        seconds = self.seconds * self.slowness.of_arms
        accepted, offered = self.acceptance.counts()
        rates = accepted / np.maximum(offered, 1.0)
        seen = rates.cumsum(0).cumsum(1).cumsum(2)[self.corners]
        experience = offered[self.corners]
        just_pays = seconds * self._autoregressive_value() - 1
        expected = (seen * experience + just_pays * DOUBT) / (experience + DOUBT)
        return np.asarray((1 + expected) / seconds)

    @property
    def autoregressive_seconds(self) -> float:
        """The estimated seconds of a decoding step without drafts."""
        return self.modeled_seconds * self.slowness.of_autoregressive

    def _autoregressive_value(self) -> float:
        return 1 / self.autoregressive_seconds
