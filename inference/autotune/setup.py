"""A target and a drafter, set up for decoding on this machine."""

from transformers import PreTrainedTokenizerBase

from inference.autotune.policy import refuse_shape, shapes_of
from inference.autotune.threads import Threads, choose_threads
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.threads import num_threads
from inference.protocol import Drafter
from inference.trees.shape import TreePlan, Trees, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.batch_invariance import check_batch_invariance
from jakiro.target.checks import CausalLM
from jakiro.target.record import check_target

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
