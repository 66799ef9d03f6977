"""The trees of a drafter: as it was trained, or the largest that are cut to size."""

from inference.costs import TIMED_PASSES
from inference.tree_budget import MAX_NODES
from inference.tree_shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter


def default_tree(drafter: JakiroDrafter) -> TreePlan:
    """Return trees of the schedule that the drafter was trained for."""
    schedule = drafter.config.settings.schedule.model_dump()
    defaults = TreePlan()
    return TreePlan(
        greedy=defaults.greedy.model_copy(update=schedule),
        sampling=defaults.sampling.model_copy(update=schedule),
    )


def largest_trees(drafter: JakiroDrafter) -> TreePlan:
    """Return the trees that `tree="auto"` cuts to size."""
    levels = {
        "autoregressive_levels": TIMED_PASSES,
        "parallel_levels": drafter.config.settings.schedule.parallel_levels,
    }
    return TreePlan(
        greedy=TreeShape(**levels, children=4, breadth=2, num_nodes=MAX_NODES),
        sampling=TreeShape(**levels, children=3, breadth=2, num_nodes=MAX_NODES, sampled=True),
    )
