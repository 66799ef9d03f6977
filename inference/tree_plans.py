"""The trees of a drafter: as it was trained, or the largest that are cut to size."""

from math import isqrt

from inference.costs import timed_passes
from inference.protocol import Budget
from inference.tree_budget import MAX_NODES
from inference.tree_shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.settings import validate_settings


def default_tree(drafter: JakiroDrafter) -> TreePlan:
    """Return trees of the schedule that the drafter was trained for."""
    schedule = drafter.config.settings.schedule.model_dump()
    defaults = TreePlan()
    return TreePlan(
        greedy=defaults.greedy.model_copy(update=schedule),
        sampling=defaults.sampling.model_copy(update=schedule),
    )


def trees_of_size(
    drafter: JakiroDrafter, num_nodes: int, num_passes: int | None = None
) -> TreePlan:
    """Return trees of at most so many candidates, as deep as the drafter's schedule if they can be.

    Which nodes a greedy tree has is left to their scores as far as possible: 8 are chosen among
    those of 3 nodes per level with 4 children each, 60 among 10 with 10 (EAGLE-2, arXiv
    2406.16858). A sampled tree, which is never cut, has the widest levels that fit.

    Args:
        drafter: whose trees they are.
        num_nodes: candidates.
        num_passes: of the drafter's trunk; None for those of its schedule.

    Raises:
        ConfigError: there cannot be so many passes.
    """
    schedule = drafter.config.settings.schedule.model_dump()
    if num_passes is not None:
        schedule["autoregressive_levels"] = num_passes
    width = isqrt(num_nodes * 5 // 3)
    sizes = {"children": max(4, width), "breadth": max(3, width), "num_nodes": num_nodes}
    wide = validate_settings(TreeShape, schedule | sizes, source="the trees")
    drawn = wide.model_copy(update={"sampled": True})
    shapes = [shape.within(Budget(num_nodes, num_nodes)) for shape in (wide, drawn)]
    greedy, sampling = (shape for shape in shapes if shape is not None)
    return TreePlan(greedy=greedy, sampling=sampling)


def largest_trees(drafter: JakiroDrafter) -> TreePlan:
    """Return the trees that `tree="auto"` cuts to size."""
    levels = {
        "autoregressive_levels": timed_passes(drafter),
        "parallel_levels": drafter.config.settings.schedule.parallel_levels,
    }
    return TreePlan(
        greedy=TreeShape(**levels, children=4, breadth=2, num_nodes=MAX_NODES),
        sampling=TreeShape(**levels, children=3, breadth=2, num_nodes=MAX_NODES, sampled=True),
    )
