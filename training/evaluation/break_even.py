"""The tau above which a drafter makes decoding faster on the machine that trains it."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from inference.autotune.costs import NODE_COUNTS, known_costs
from inference.trees.shape import TreeShape
from jakiro.config import AUTO_DRAFT_VOCAB_SIZES
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

_NEAR = 0.8  # fraction of the largest possible tau that trained drafters rarely exceed


class BreakEven(NamedTuple):
    """The costs of decoding steps with drafts, relative to steps without drafts.

    A step without drafts emits one token, and a step with drafts emits tau tokens on average. So
    each cost is also the tau above which a tree of this size makes decoding faster.

    Attributes:
        smallest: number of candidates in the smallest tree, which has one at each depth.
        largest: number of candidates in the largest tree.
        lowest: cost of a step with the smallest tree.
        highest: cost of a step with the largest tree.
        largest_tau: tau of a drafter of which every draft is accepted: the depth of its trees + 1.
        cheaper: changes to the settings that make drafting cheaper.
    """

    smallest: int
    largest: int
    lowest: float
    highest: float
    largest_tau: int
    cheaper: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"on this machine, a decoding step with a tree of {self.smallest} to {self.largest} "
            f"candidates costs as much as {self.lowest:.1f} to {self.highest:.1f} steps without "
            "drafts: the drafter makes decoding faster if its tau exceeds this number; its tau is "
            f"at most {self.largest_tau}"
        )

    @property
    def warning(self) -> str | None:
        """A warning with proposals if few drafters can save time; None if costs are low enough."""
        limit = _NEAR * self.largest_tau
        if self.highest <= limit:
            return None
        trees = "a tree of any size" if self.lowest > limit else "a large tree"
        proposals = self.cheaper if self.lowest > limit else ()
        return (
            f"the cost of {trees} is close to or above the largest possible tau; consider "
            f"{' or '.join((*proposals, 'decoding with fewer candidates'))}, and measure again "
            "while nothing else runs"
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
    return BreakEven(*sizes, next(rates), next(rates), depth + 1, tuple(_cheaper(drafter)))


def _cheaper(drafter: JakiroDrafter) -> Iterator[str]:
    """Yield changes to the settings that make drafting cheaper."""
    config, smallest = drafter.config, AUTO_DRAFT_VOCAB_SIZES[0]
    if (config.draft_vocab_size or config.target_record.vocab_size) > smallest:
        yield f"a smaller drafter.draft_vocab_size, such as {smallest}"
    if config.settings.experts.num_experts > 1:
        yield "drafter.experts.num_experts=1"


def _tree(drafter: JakiroDrafter, num_nodes: int) -> TreeShape:
    """Return a shape with the levels of the drafter's schedule and exactly `num_nodes` nodes."""
    schedule = drafter.config.settings.schedule
    return TreeShape(
        autoregressive_levels=schedule.autoregressive_levels,
        parallel_levels=schedule.parallel_levels,
        children=num_nodes,
        num_nodes=num_nodes,
    )
