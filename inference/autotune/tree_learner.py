"""The learning policy of `tree="auto"`, which selects the trees and the threads of each step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference.autotune.arms import NodePosition, TreeArm
from inference.autotune.step_seconds import StepSeconds
from inference.autotune.thread_choice import TimedThreads
from inference.engine.policy import RunProgress
from inference.protocol import Budget
from inference.rates import FadingRates

FIRST_TREE = 8  # largest number of nodes of the trees before any observation
# Weight, in verified trees, of the prior that drafting is as fast as not drafting; the second one
# is too small to matter after any observation.
DOUBT, NO_DOUBT = 4.0, 1e-9
MEMORY = 256.0  # number of later trees after which the weight of a tree has dropped to 1/e
# numbers of decoding steps with drafts before drafting may pause: at the start, and after a pause
FIRST_TRIAL, LATER_TRIAL = 8, 4
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 3072  # decoding steps without drafts before the next trial
# number of drafted steps after which the largest tree and a step without drafts are tried
EXPLORE_EVERY = 32
# Number of candidates by which the expected number of accepted ones may be too low, after a single
# tree of a kind; after n trees, it is divided by the square root of n.
DEVIATION = 1.0
# Largest share of the seconds without drafts that the drafter may take to read tokens: before any
# observation, and if drafting has not paid.
UNTRIED_SHARE, DOUBTFUL_SHARE = 0.5, 0.05


class TreeLearner:
    """Estimates for all runs with the same sampling and batch size.

    Args:
        arms: trees to select from, of one kind after the other, each with the largest last.
        read_seconds: seconds in which the drafter reads one token of a context.
    """

    def __init__(
        self, arms: Sequence[TreeArm], timings: Sequence[StepSeconds], read_seconds: float = 0.0
    ) -> None:
        self.arms = arms
        self.threads = TimedThreads(timings)
        self.read_seconds = read_seconds
        kinds = np.array([_kind(arm) for arm in arms])
        self.kinds = [np.flatnonzero(kinds == kind).tolist() for kind in range(kinds.max() + 1)]
        blocks = np.array([arm.block for arm in arms])
        self.corners = (kinds, *(blocks.T - 1))
        self.acceptance = FadingRates((len(self.kinds), *blocks.max(axis=0).tolist()), MEMORY)
        self.num_drafted = 0
        self.left_of_pause = 2  # decoding starts with two steps without drafts, to time such steps
        self.left_of_trial = FIRST_TRIAL
        self.pause = SHORTEST_PAUSE
        self.bests = [_first([arms[index] for index in own]) for own in self.kinds]  # of each kind
        self.num_tried = np.zeros(len(self.kinds))  # weighted numbers of trees of each kind

    @property
    def timing(self) -> StepSeconds:
        return self.threads.timing

    def arm_of(self, budget: Budget | None) -> TreeArm | None:
        """Return the size with these limits; None for a step without drafts."""
        return next((arm for arm in self.arms if arm.budget == budget), None)

    def choose(self, progress: RunProgress) -> TreeArm | None:
        """Return the size of the next step's trees; None for a step without drafts."""
        if self.left_of_pause > 0 or not self._repays_reading(progress):
            return None
        return self._drafted()

    def learn(
        self,
        arm: TreeArm | None,
        positions: Sequence[NodePosition],
        batch: int,
        seconds: float | None,
        timing: StepSeconds | None = None,
    ) -> None:
        timing = timing or self.timing
        if seconds is not None:
            index = None if arm is None else self.arms.index(arm)
            has_changed = self.threads.take(timing, index, seconds)
            if has_changed and arm is not None:
                self.left_of_pause = 2  # steps without drafts are timed again
        if arm is None:
            self.left_of_pause = max(0, self.left_of_pause - 1)
        else:
            self.num_drafted += 1
            self.left_of_trial -= 1
            self._count(arm, positions, batch)
            if not self.threads.is_trial:  # a decision must not rest on another number of threads
                self._decide()
        if self.threads.after_step(timing, self._rate):
            self.left_of_pause, self.left_of_trial = 0, LATER_TRIAL  # trees are tried anew

    def _drafted(self) -> TreeArm:
        """Return the best tree, or another one, to learn how often its candidates are accepted."""
        turn, step = divmod(self.num_drafted, EXPLORE_EVERY)
        if step == EXPLORE_EVERY - 1:
            return self.arms[self.kinds[turn % len(self.kinds)][-1]]
        return self.bests[self._likely_kind()]

    def _likely_kind(self) -> int:
        """Return the kind of trees that may give the most tokens per second.

        The less is known of a kind, the higher its expected number of tokens is assumed to be, as
        in discounted UCB (arXiv 0805.3415). So a worse kind is tried seldom, but again and again.
        """
        if len(self.kinds) == 1:
            return 0
        indices = [self.arms.index(best) for best in self.bests]
        deviation = DEVIATION / np.sqrt(np.maximum(self.num_tried, NO_DOUBT))
        values = self._values(self.timing, NO_DOUBT)[indices]
        return int((values + deviation / self.timing.of_arms[indices]).argmax())

    def _decide(self) -> None:
        """Select the best tree of each kind, or pause drafting."""
        is_tried = self.acceptance.counts()[1][self.corners] > 0
        values = np.where(is_tried, self._values(self.timing), 0.0)
        if values.max() > 1 / self.timing.of_autoregressive:
            for kind in np.flatnonzero(self.num_tried):
                self.bests[kind] = self.arms[max(self.kinds[kind], key=values.__getitem__)]
            self.pause = SHORTEST_PAUSE
            if self.num_drafted % EXPLORE_EVERY == 0:
                self.left_of_pause = 1
        elif self.left_of_trial <= 0:
            self.left_of_pause, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.left_of_trial = LATER_TRIAL

    def _rate(self, timing: StepSeconds) -> float:
        """Return the tokens per second that are expected with a number of threads."""
        best = float(self._values(timing).max())
        return max(best, 1 / timing.of_autoregressive)

    def _count(self, arm: TreeArm, positions: Sequence[NodePosition], batch: int) -> None:
        accepted, offered = np.zeros((2, *self.acceptance.shape))
        kind, (depth, width, children) = _kind(arm), arm.block
        offered[kind, :depth, :width, :children] = batch
        for position in positions:
            accepted[kind, *position] += 1
        self.acceptance.add(accepted, offered)
        self.num_tried *= np.exp(-batch / MEMORY)
        self.num_tried[kind] += batch

    def _values(self, timing: StepSeconds, doubt: float = DOUBT) -> NDArray[np.float64]:
        """Return the expected tokens per second of each tree.

        Before any observation, each tree is expected to be as fast as decoding without drafts.
        """
        seconds = timing.of_arms
        accepted, offered = self.acceptance.counts()
        rates = accepted / np.maximum(offered, 1.0)
        seen = rates.cumsum(1).cumsum(2).cumsum(3)[self.corners]
        experience = offered[self.corners]
        just_pays = seconds / timing.of_autoregressive - 1
        expected = (seen * experience + just_pays * doubt) / (experience + doubt)
        return np.asarray((1 + expected) / seconds)

    def _repays_reading(self, progress: RunProgress) -> bool:
        """Return whether drafting may save the time in which the drafter reads the context."""
        if progress.left is None:
            return True
        alone = self.timing.of_autoregressive
        share = UNTRIED_SHARE
        if self.num_drafted:
            best = float(self._values(self.timing).max())
            share = max(DOUBTFUL_SHARE, 1 - 1 / (alone * best))
        return progress.unread * self.read_seconds <= share * progress.left * alone


def _kind(arm: TreeArm) -> int:
    return int(arm.budget.deterministic)


def _first(arms: Sequence[TreeArm]) -> TreeArm:
    small = [arm for arm in arms if arm.budget.num_nodes <= FIRST_TREE]
    return small[-1] if small else arms[0]
