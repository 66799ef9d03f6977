"""A target and a drafter, set up for decoding on this machine."""

from math import isqrt

from transformers import PreTrainedTokenizerBase

from inference.autotune.costs import timed_passes
from inference.autotune.threads import Threads, choose_threads
from inference.drafters.trained.drafter import TrainedDrafter
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

_TREES = '"fixed", a TreeShape or a TreePlan'


def refuse_unusable(tree: object, threads: object) -> None:
    """Raise an error if an argument of `SpeculativeDecoder` has an unusable value.

    Without this check, some misspelt values would have the effect of others.
    """
    is_number = isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1
    for name, value, is_usable, others in (
        ("tree", tree, tree == "fixed" or isinstance(tree, TreeShape | TreePlan), _TREES),
        ("threads", threads, threads is None or is_number, "None, or a number of at least 1"),
    ):
        if not is_usable and value != "auto":
            raise ConfigError(
                f"{name}= cannot be used", expected=f'"auto", {others}', got=repr(value)
            )


def set_up_target(
    model: CausalLM,
    threads: Threads = None,
    *,
    compiled: bool = False,
    batch_invariant: bool = False,
    captured: bool = False,
    drafter: JakiroDrafter | Drafter | None = None,
    other_weights: bool = False,
) -> tuple[TargetAdapter, int | None]:
    """Return the adapter of a target in evaluation mode, and the number of threads of its steps."""
    for other, is_set in (("batch_invariant", batch_invariant), ("captured", captured)):
        if compiled and is_set:
            raise ConfigError(f"{other}=True and compiled=True cannot be combined")
    target = TargetAdapter(model.eval())
    if isinstance(drafter, JakiroDrafter):  # before anything is copied
        check_target(drafter.config.target_record, target.spec, other_weights=other_weights)
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
    drafter: JakiroDrafter | Drafter,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase | None,
    tree: Trees,
    *,
    compiled: bool = False,
    other_weights: bool = False,
    threads: int | None = None,
) -> Drafter:
    """Return a drafter that is ready to draft for a target; only trained drafters are changed."""
    if not isinstance(drafter, JakiroDrafter):
        refuse_shape(tree)
        return drafter
    with num_threads(threads):
        return TrainedDrafter.for_target(
            drafter,
            target,
            tokenizer,
            shapes_of(drafter, tree),
            compiled=compiled,
            other_weights=other_weights,
        )


def shapes_of(drafter: JakiroDrafter, tree: Trees) -> TreeShape | TreePlan | None:
    """Return the trees of a trained drafter; None for trees with as many levels as in training."""
    if tree == "auto":
        return largest_trees(drafter)
    return None if isinstance(tree, str) else tree


def refuse_shape(tree: Trees) -> None:
    """Raise an error if `tree` is a shape or a plan, which only trained drafters have."""
    if not isinstance(tree, str):
        raise ConfigError(
            "only the trees of a trained drafter have a shape",
            expected='tree="auto" or tree="fixed" for this drafter',
            got=tree,
            remedy="set num_nodes and depth in the drafter's settings",
        )


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
