"""A target and a drafter, set up for decoding on this machine."""

from transformers import PreTrainedTokenizerBase

from inference.autotune.compute import Compute, Packed, Threads, choose_compute
from inference.autotune.draft_forms import with_forms
from inference.autotune.policy import refuse_shape, shapes_of
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import OWN_FORMS, DraftForms, FormChoice
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


def refuse_unusable(tree: object, threads: object, packed: object, draft_forms: object) -> None:
    """Raise an error if an argument of `SpeculativeDecoder` has an unusable value.

    Without this check, some misspelt values would have the effect of others.
    """
    is_number = isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1
    for name, value, is_usable, others in (
        ("tree", tree, tree == "fixed" or isinstance(tree, TreeShape | TreePlan), _TREES),
        ("threads", threads, threads is None or is_number, "None, or a number of at least 1"),
        ("packed", packed, isinstance(packed, bool), "True or False"),
        ("draft_forms", draft_forms, isinstance(draft_forms, DraftForms), "DraftForms(...)"),
    ):
        if not is_usable and value != "auto":
            raise ConfigError(
                f"{name}= cannot be used", expected=f'"auto", {others}', got=repr(value)
            )


def set_up_target(
    model: CausalLM,
    threads: Threads = None,
    packed: Packed = False,
    *,
    compiled: bool = False,
    batch_invariant: bool = False,
    captured: bool = False,
    drafter: JakiroDrafter | Drafter | None = None,
    other_weights: bool = False,
) -> tuple[TargetAdapter, Compute]:
    """Return the adapter of a target in evaluation mode, and the way in which it computes."""
    if compiled:
        _refuse_with_compiled(
            packed=packed is True, batch_invariant=batch_invariant, captured=captured
        )
        packed = False  # compiled layers compute in one way only
    target = TargetAdapter(model.eval())
    if isinstance(drafter, JakiroDrafter):  # before anything is measured
        check_target(drafter.config.target_record, target.spec, other_weights=other_weights)
    if batch_invariant:
        target.make_batch_invariant()
    if captured:
        target.modules.group_heads()
    # If the target is batch-invariant, the choice must not depend on the drafter either.
    drafts = drafter is not None or batch_invariant
    compute = choose_compute(target, threads, packed, drafts=drafts)
    compute.prepare(target)
    with num_threads(compute.threads):
        if batch_invariant:
            check_batch_invariance(target)
    if compiled:
        target.compile()
    return target, compute


def set_up_drafter(
    drafter: JakiroDrafter | Drafter,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase | None,
    tree: Trees,
    *,
    compiled: bool = False,
    draft_forms: FormChoice = OWN_FORMS,
    other_weights: bool = False,
    threads: int | None = None,
) -> Drafter:
    """Return a drafter that is ready to draft for a target; only trained drafters are changed."""
    if not isinstance(drafter, JakiroDrafter):
        refuse_shape(tree)
        return drafter
    with num_threads(threads):
        trained = TrainedDrafter.for_target(
            drafter,
            target,
            tokenizer,
            shapes_of(drafter, tree),
            compiled=compiled,
            other_weights=other_weights,
        )
        return with_forms(trained, draft_forms)


def _refuse_with_compiled(**others: bool) -> None:
    for other, is_set in others.items():
        if is_set:
            raise ConfigError(f"{other}=True and compiled=True cannot be combined")
