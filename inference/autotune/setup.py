"""A target and a drafter, set up for decoding on this machine."""

from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.autotune.costs import timed_passes
from inference.autotune.threads import Threads, choose_threads
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.protocol import Budget, Drafter
from inference.trees.shape import TreePlan, Trees, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.batch_invariance import check_batch_invariance
from jakiro.target.checks import CausalLM
from jakiro.target.record import check_target
from jakiro.utils.devices import num_threads
from jakiro.utils.settings import validate_settings

MAX_NODES = 24  # of the largest trees that `tree="auto"` may select


class Pair(NamedTuple):
    """A trained drafter that will share the trees of a decoder with another drafter.

    Attributes:
        combine: function from the first drafter, made for the target, to the drafter of both.
    """

    first: JakiroDrafter
    combine: Callable[[TrainedDrafter], Drafter]


def refuse_unusable(tree: object) -> None:
    """Raise an error if trees are misspelt, which would have the effect of "fixed"."""
    if tree not in ("auto", "fixed") and not isinstance(tree, TreeShape | TreePlan):
        raise ConfigError(
            "tree= cannot be used",
            expected='"auto", "fixed", a TreeShape or a TreePlan',
            got=repr(tree),
        )


def set_up_target(
    model: CausalLM,
    threads: Threads = None,
    *,
    compiled: bool = False,
    batch_invariant: bool = False,
    captured: bool = False,
    drafter: JakiroDrafter | Drafter | Pair | None = None,
    other_weights: bool = False,
) -> tuple[TargetAdapter, int | None]:
    """Return the adapter of a target in evaluation mode, and the number of threads of its steps."""
    for other, is_set in (("batch_invariant", batch_invariant), ("captured", captured)):
        if compiled and is_set:
            raise ConfigError(f"{other}=True and compiled=True cannot be combined")
    target = TargetAdapter(model.eval())
    if captured:
        target.need_trees("captured=True")
    trained = drafter.first if isinstance(drafter, Pair) else drafter
    if isinstance(trained, JakiroDrafter):  # before anything is copied
        check_target(trained.config.target_record, target.spec, other_weights=other_weights)
    if not compiled:
        # A recorded step must not read weights in a format that only the CPU knows.
        target.fuse(batch_invariant=batch_invariant, reorders=not captured)
    # If the target is batch-invariant, the choice must not depend on the drafter either.
    number = choose_threads(target, threads, drafts=drafter is not None or batch_invariant)
    if batch_invariant:
        with num_threads(number):
            check_batch_invariance(target)
    if compiled:
        target.compile()
    return target, number


def set_up_drafter(
    drafter: JakiroDrafter | Drafter | Pair,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase | None,
    tree: Trees,
    *,
    compiled: bool = False,
    other_weights: bool = False,
    threads: int | None = None,
) -> Drafter:
    """Return a drafter that is ready to draft for a target; only trained drafters are changed.

    With "auto", a trained drafter can draft the largest trees that may be selected; in a pair, its
    trees have as many levels as in training.
    """
    if target.spec.is_recurrent and not isinstance(tree, str):
        raise ConfigError(
            "the drafts of a target with recurrent layers are chains, which have no other shape",
            got=tree,
            remedy='use tree="auto" or tree="fixed"',
        )
    if isinstance(drafter, Drafter):
        if isinstance(tree, str):
            return drafter
        raise ConfigError(
            "only the trees of a trained drafter have a shape",
            expected='tree="auto" or tree="fixed" for this drafter',
            got=tree,
            remedy="set num_nodes and depth in the drafter's settings",
        )
    trained = drafter.first if isinstance(drafter, Pair) else drafter
    shapes = None if isinstance(tree, str) else tree
    if tree == "auto" and trained is drafter:
        shapes = largest_trees(trained)
    if target.spec.is_recurrent:
        shapes = chains(shapes or default_tree(trained), only_sampled=trained is not drafter)
    with num_threads(threads):
        ready = TrainedDrafter.for_target(
            trained, target, tokenizer, shapes, compiled=compiled, other_weights=other_weights
        )
    return drafter.combine(ready) if isinstance(drafter, Pair) else ready


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


def chains(trees: TreeShape | TreePlan, *, only_sampled: bool) -> TreePlan:
    """Return chains with as many levels as the given trees.

    Args:
        only_sampled: whether only trees with sampled candidates become chains. Other trees, from
            which the best path is taken later, have more room for the candidates of two drafters.
    """
    greedy, sampling = (
        shape.model_copy(update={"children": 1, "breadth": 1, "num_nodes": shape.depth})
        for shape in TreePlan.of(trees).shapes
    )
    return TreePlan(greedy=TreePlan.of(trees).greedy if only_sampled else greedy, sampling=sampling)


def largest_trees(drafter: JakiroDrafter) -> TreePlan:
    levels = {
        "autoregressive_levels": timed_passes(drafter),
        "parallel_levels": drafter.config.settings.schedule.parallel_levels,
    }
    return TreePlan(
        greedy=TreeShape(**levels, children=4, breadth=2, num_nodes=MAX_NODES),
        sampling=TreeShape(**levels, children=3, breadth=2, num_nodes=MAX_NODES, sampled=True),
    )
