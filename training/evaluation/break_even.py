"""The tau above which a drafter makes decoding faster on the machine that trains it."""

from copy import deepcopy
from typing import Any, NamedTuple

from inference.autotune.costs import NODE_COUNTS, known_costs
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter


class BreakEven(NamedTuple):
    """The costs of decoding steps with drafts, relative to steps without drafts.

    A step without drafts emits one token, and a step with drafts emits tau tokens on average. So
    each cost is also the tau above which a tree of this size makes decoding faster.

    Attributes:
        smallest: number of candidates in the smallest tree, which has one at each depth.
        largest: number of candidates in the largest tree.
        lowest: cost of a step with the smallest tree.
        highest: cost of a step with the largest tree.
    """

    smallest: int
    largest: int
    lowest: float
    highest: float

    def __str__(self) -> str:
        return (
            f"on this machine, a decoding step with a tree of {self.smallest} to {self.largest} "
            f"candidates costs as much as {self.lowest:.1f} to {self.highest:.1f} steps without "
            "drafts: the drafter makes decoding faster if its tau exceeds this number"
        )


def break_even(target: TargetAdapter, drafter: JakiroDrafter) -> BreakEven:
    """Return the tau that the trees of a drafter must exceed; it does not depend on the weights.

    The times are measured in a few seconds, and kept in the user's cache folder.

    Args:
        target: the frozen target.
        drafter: the drafter, which stays unchanged; a copy in the target's dtype is timed.
    """
    timed: Any = deepcopy(drafter)
    costs = known_costs(target, timed.to(target.device, target.dtype).eval())
    schedule = drafter.config.settings.schedule
    depth = schedule.autoregressive_levels + schedule.parallel_levels
    sizes = (depth, max(depth, max(NODE_COUNTS)))
    rates = (costs.ceiling(None, 1.0) / costs.ceiling(_tree(drafter, size), 1.0) for size in sizes)
    return BreakEven(*sizes, *rates)


def _tree(drafter: JakiroDrafter, num_nodes: int) -> TreeShape:
    """Return a shape with the levels of the drafter's schedule and exactly `num_nodes` nodes."""
    schedule = drafter.config.settings.schedule
    return TreeShape(
        autoregressive_levels=schedule.autoregressive_levels,
        parallel_levels=schedule.parallel_levels,
        children=num_nodes,
        num_nodes=num_nodes,
    )
