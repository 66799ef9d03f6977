"""What is learned from steps decides on the trees, and on the number of threads."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers.tables import no_processors

from inference.autotune.arms import NodePosition, TreeArm, tree_arms
from inference.autotune.costs import Costs
from inference.autotune.step_seconds import StepSeconds
from inference.autotune.tree_learner import (
    EXPLORE_EVERY,
    TreeLearner,
)
from inference.engine.policy import RunProgress
from inference.trees.shape import TreePlan, TreeShape

COSTS = Costs(verify={0: 1.0, 4: 1.2, 8: 1.5, 24: 3.0}, draft={1: 0.2, 2: 0.4, 3: 0.6})
PLAN = TreePlan.of(
    TreeShape(autoregressive_levels=3, parallel_levels=1, children=4, breadth=2, num_nodes=24)
)
ARMS = tree_arms(PLAN, no_processors(do_sample=False), COSTS)
BOTH = tree_arms(PLAN.model_copy(update={"sampling": TreePlan().sampling}), no_processors(), COSTS)
UNKNOWN = RunProgress()


def _learner(*threads: int, read: float = 0.0) -> TreeLearner:
    timings = [StepSeconds(ARMS, COSTS, number) for number in (None, *threads)]
    return TreeLearner(ARMS, timings, read)


def _step(
    learner: TreeLearner,
    slower: float = 1.0,
    num_accepted: int = 4,
    positions: list[NodePosition] | None = None,
) -> TreeArm | None:
    """Take a step `slower` times as long as modeled, and return the size of its trees."""
    arm = learner.choose(UNKNOWN)
    if arm is None:
        learner.learn(None, [], 1, slower * COSTS.verify_seconds(0), 0)
        return None
    depth, width, _ = arm.block
    path = [(level, level, 0) for level in range(min(depth, width, num_accepted))]
    learner.learn(arm, path if positions is None else positions, 1, slower * arm.seconds, 0)
    return arm


def test_trees_that_are_slower_than_modelled_are_given_up() -> None:
    learner = _learner()
    for _ in range(20):
        slower = 1.0 if learner.choose(UNKNOWN) is None else 10.0
        _step(learner, slower, num_accepted=1)
    assert learner.choose(UNKNOWN) is None


def _slowness(learner: TreeLearner, of_own: float, of_other: float) -> float:
    return of_own if learner.timing.threads is None else of_other


@pytest.mark.parametrize("num_accepted", [0, 4], ids=["useless", "useful"])
def test_another_number_of_threads_is_used_while_the_machine_is_busy(num_accepted: int) -> None:
    learner = _learner(1)

    def run(count: int, load: Callable[[], float]) -> list[int | None]:
        used = []
        for _ in range(count):
            used.append(learner.timing.threads)
            _step(learner, load(), num_accepted)
        return used

    quiet = run(400, lambda: _slowness(learner, 1.0, 1.7))
    assert quiet.count(1) <= 9
    busy = run(100, lambda: _slowness(learner, 4.0, 1.8))
    assert busy[30:].count(1) >= 65
    quiet = run(100, lambda: _slowness(learner, 1.0, 1.7))
    # If one thread is hardly slower than on the busy machine, this is found by a later trial.
    assert quiet.count(None) > 50 or run(200, lambda: _slowness(learner, 1.0, 1.7))[-1] is None


@pytest.mark.parametrize("better", [0, 1])
def test_the_worse_kind_of_trees_is_tried_seldom_but_again_and_again(better: int) -> None:
    learner = TreeLearner(BOTH, [StepSeconds(BOTH, COSTS)])
    first, drafted = list(learner.bests), []
    while len(drafted) < 800:
        arm = learner.choose(UNKNOWN)
        kind = None if arm is None else int(arm.budget.deterministic)
        is_accepted = kind == better and len(drafted) % 2 == 0
        _step(learner, positions=[(0, 0, 0)] if is_accepted else [])
        drafted += [] if arm is None else [(kind, arm)]
    worse = [kind != better for kind, _ in drafted]
    assert sum(worse[:32]) <= 8
    # Until the largest trees are tried, all trees are parts of the first ones of their kinds.
    for kind, arm in drafted[: EXPLORE_EVERY - 1]:
        assert np.less_equal(arm.block, first[kind].block).all()
    for start in range(0, 800, 200):
        assert 1 <= sum(worse[start : start + 200]) <= 16
    for kind in (0, 1):  # the largest trees of both kinds are tried
        assert BOTH[learner.kinds[kind][-1]] in [arm for _, arm in drafted]


def test_drafting_begins_only_where_it_may_repay_the_reading_of_the_context() -> None:
    learner = _learner(read=0.01)
    for _ in range(2):
        _step(learner)
    # Reading takes 10 seconds: at first, drafting may take half of the seconds that are left.
    assert learner.choose(RunProgress(1000, 10)) is None
    assert learner.choose(RunProgress(1000, 100)) is not None
    assert learner.choose(RunProgress(0, 1)) is not None  # everything has been read
    while _step(learner, num_accepted=0) is not None:
        pass
    learner.left_of_pause = 0
    # Drafting has not paid, so that it may take a small part of the seconds only.
    assert learner.choose(RunProgress(1000, 100)) is None
    assert learner.choose(RunProgress(1000, 1000)) is not None
    useful = _learner(read=0.01)
    for _ in range(60):
        _step(useful)
    # A gain is expected here, and may be spent.
    assert useful.choose(RunProgress(1000, 100)) is not None
    assert useful.choose(RunProgress(1000, 10)) is None
