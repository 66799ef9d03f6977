"""The tau above which a drafter makes decoding faster on the machine that trains it."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from inference.autotune.costs import NODE_COUNTS, known_costs
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import AUTO_DRAFT_VOCAB_SIZES
from jakiro.target.adapter import TargetAdapter

_NEAR = 0.8  # trained drafters rarely exceed this fraction of the largest possible tau


class BreakEven(NamedTuple):
    """The costs of decoding steps with drafts, relative to steps without drafts.

    A step without drafts emits one token, and a step with drafts emits tau tokens on average. So
    each cost is also the tau above which trees of the same size make decoding faster.

    Attributes:
        smallest: number of candidates in the smallest tree, which has one at each depth.
        largest: number of candidates in the largest tree.
        lowest: cost of a step with the smallest tree.
        highest: cost of a step with the largest tree.
        largest_tau: tau if every draft is accepted, which is the depth of the trees + 1.
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
            f"on this machine, a decoding step with a tree of {self.smallest} candidates costs as "
            f"much as {self.lowest:.1f} steps without drafts, and one with {self.largest} "
            f"candidates as much as {self.highest:.1f}: a tree makes decoding faster if "
            f"tau exceeds its cost; tau is at most {self.largest_tau}"
        )

    @property
    def warning(self) -> str | None:
        """A warning with proposals if few drafters can save time; None if costs are low enough."""
        limit = _NEAR * self.largest_tau
        if self.highest <= limit:
            return None
        is_any = self.lowest > limit
        trees = "a tree of any size" if is_any else "a large tree"
        proposals = " or ".join(self.cheaper if is_any else ("decode with fewer candidates",))
        return (
            f"decoding steps with {trees} take so long that tau can hardly make up for it; remedy: "
            f"{f'{proposals}, or ' if proposals else ''}measure again while nothing else runs, "
            "because other programs distort the measurement"
        )


def break_even(target: TargetAdapter, drafter: JakiroDrafter) -> BreakEven:
    """Return the values of tau above which trees save time; they do not depend on the weights.

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
        yield f"set drafter.draft_vocab_size={smallest}"
    if config.settings.experts.num_experts > 1:
        yield "set drafter.experts.num_experts=1"


def _tree(drafter: JakiroDrafter, num_nodes: int) -> TreeShape:
    """Return a shape with the levels of the drafter's schedule and exactly `num_nodes` nodes."""
    schedule = drafter.config.settings.schedule
    return TreeShape(
        autoregressive_levels=schedule.autoregressive_levels,
        parallel_levels=schedule.parallel_levels,
        children=num_nodes,
        num_nodes=num_nodes,
    )
