"""The shapes of a trained drafter's trees: those of a given size, and the largest."""

from math import isqrt

from inference.autotune.costs import timed_passes
from inference.protocol import Budget
from inference.trees.shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.utils.settings import validate_settings

MAX_NODES = 24


def trees_of_size(
    drafter: JakiroDrafter, num_nodes: int, num_passes: int | None = None
) -> TreePlan:
    """Return trees of at most `num_nodes` candidates, if possible as deep as in training.

    A greedy tree consists of the nodes with the highest scores in a larger tree, as in EAGLE-2
    (arXiv 2406.16858). For 8 nodes, each level of the larger tree has 3 expanded nodes with 4
    children each; for 60 nodes, each level has 10 expanded nodes with 10 children each. A sampled
    tree, from which no candidate may be removed, has the widest levels that fit.
    """
    levels = drafter.levels
    if num_passes is not None:
        levels["autoregressive_levels"] = num_passes
    width = isqrt(num_nodes * 5 // 3)
    sizes = {"children": max(4, width), "breadth": max(3, width), "num_nodes": num_nodes}
    wide = validate_settings(TreeShape, levels | sizes, source="the trees")
    sampled = wide.model_copy(update={"sampled": True})
    shapes = [shape.within(Budget(num_nodes, num_nodes)) for shape in (wide, sampled)]
    greedy, sampling = (shape for shape in shapes if shape is not None)
    return TreePlan(greedy=greedy, sampling=sampling)


def largest_trees(drafter: JakiroDrafter) -> TreePlan:
    """Return the largest trees that `tree="auto"` may select."""
    levels = {
        "autoregressive_levels": timed_passes(drafter),
        "parallel_levels": drafter.config.settings.schedule.parallel_levels,
    }
    return TreePlan(
        greedy=TreeShape(**levels, children=4, breadth=2, num_nodes=MAX_NODES),
        sampling=TreeShape(**levels, children=3, breadth=2, num_nodes=MAX_NODES, sampled=True),
    )
