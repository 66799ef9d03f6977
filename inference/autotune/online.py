"""Selection of the size and kind of the draft tree in each decoding step, for `tree="auto"`.

Each step has no drafts, or the tree that is expected to give the most tokens per second:
(1 + expected accepted candidates) / (seconds to draft and verify). A few steps are timed at the
start, and the durations of decoding steps correct them. An acceptance rate is learned for every
node position; smaller trees consist of the first positions of larger ones. If tokens are
sampled, sampled and deterministic trees of a model are both tried. If drafting does not pay, it
pauses, twice as long each time. Another number of threads is tried now and then, and whenever the
load of the machine has changed.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from inference.autotune.arms import tree_arms
from inference.autotune.costs import Costs
from inference.autotune.step_seconds import StepSeconds
from inference.autotune.tree_learner import TreeLearner
from inference.draft_tree import SequenceTree
from inference.engine.policy import AlwaysDraft, RunProgress
from inference.protocol import Budget, RequestCounter
from inference.sampling.options import Sampling
from inference.trees.shape import TreePlan

MOST_LEARNERS = 64  # largest number of kinds of runs whose estimates are kept


class AutoTree:
    """Selects trees for all requests of a decoder, and learns from all of them.

    Args:
        other_threads: costs with other numbers of threads than the decoder's, by number. If there
            are none, all steps compute with the decoder's number.
        seeded_costs: costs that determine the trees of seeded requests, whatever number of threads
            was fastest when the process started; None for `costs`.
    """

    def __init__(
        self,
        trees: TreePlan | Budget,
        costs: Costs,
        on_reset: Callable[[], None] = lambda: None,
        other_threads: Mapping[int, Costs] | None = None,
        seeded_costs: Costs | None = None,
    ) -> None:
        self.trees = trees
        self.costs = costs
        self.other_threads = other_threads or {}
        self.seeded_costs = seeded_costs or costs
        self._on_reset = on_reset
        self.request_counter = RequestCounter()
        self._lock = Lock()
        self._learners: dict[object, TreeLearner] = {}  # the most recently used is last

    def new_run(self, sampling: Sampling, batch: int) -> "AutoRun":
        """Return the policy of a run; runs with the same sampling and batch size share estimates.

        If there are too many kinds of runs, the estimates of the least recently used are dropped.
        """
        key = (sampling.description, batch)
        with self._lock:
            learner = self._learners.pop(key, None)
            if learner is None:
                learner = self._new_learner(sampling, batch)
            self._learners[key] = learner
            if len(self._learners) > MOST_LEARNERS:
                del self._learners[next(iter(self._learners))]
        return AutoRun(learner, self._lock)

    def _new_learner(self, sampling: Sampling, batch: int) -> TreeLearner:
        by_threads = [
            (threads, costs.of_batch(batch))
            for threads, costs in ((None, self.costs), *self.other_threads.items())
        ]
        each = [(own, costs, tree_arms(self.trees, sampling, costs)) for own, costs in by_threads]
        timings = [StepSeconds(arms, costs, threads) for threads, costs, arms in each]
        return TreeLearner(each[0][-1], timings, self.costs.read)

    def reset(self) -> None:
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
    """

    request_counter: RequestCounter | None = None

    def __init__(self, auto: AutoTree) -> None:
        self._auto = auto

    def new_run(self, sampling: Sampling, batch: int) -> AlwaysDraft:
        """Return the policy of a run, which learns nothing."""
        costs = self._auto.seeded_costs.of_batch(batch)
        every = tree_arms(self._auto.trees, sampling, costs)
        arms = [arm for arm in every if not arm.budget.deterministic]  # rates are not known
        best = max(arms, key=lambda arm: arm.assumed_tau / arm.seconds)
        pays = best.assumed_tau / best.seconds > 1 / costs.verify_seconds(0)
        return AlwaysDraft(best.budget if pays else None)

    def reset(self) -> None:
        """Do nothing, because nothing was learned."""


class LaneTrees(ReproducibleTree):
    """Policy of a lane, whose sequences come and go.

    If any sequence samples, trees have the size that is expected to be fastest for a full lane,
    because sampled text depends on the trees. Greedy text does not, so its trees become smaller as
    more sequences are decoded together, each of which makes verification slower.
    """

    def __init__(self, auto: AutoTree, places: int) -> None:
        super().__init__(auto)
        self.places = places

    def new_run(self, sampling: Sampling, batch: int) -> AlwaysDraft:
        return super().new_run(sampling, self.places if sampling.do_sample else batch)


class AutoRun:
    """Policy of a single run."""

    def __init__(self, learner: TreeLearner, lock: Lock) -> None:
        self._learner = learner
        self._lock = lock
        self._was_requested = False
        self._timing = learner.timing  # with the number of threads of the next step

    @property
    def autoregressive_seconds(self) -> float:
        """The seconds of a decoding step without drafts, as far as such steps were timed."""
        with self._lock:
            return self._learner.timing.of_timed_autoregressive

    @property
    def threads(self) -> int | None:
        return self._timing.threads

    def next_budget(self, progress: RunProgress) -> Budget | None:
        with self._lock:
            arm = self._learner.choose(progress)
        return None if arm is None else arm.budget

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
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
            self._learner.learn(
                arm,
                positions,
                len(trees),
                seconds if is_timed else None,
                self._timing,
            )
            self._timing = self._learner.timing
