"""Loading of the target of a comparison, and construction of the compared methods."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.autotune.setup import trees_of_size
from inference.autotune.threads import Threads, choose_threads, contending_threads
from inference.benchmark.methods import JakiroDecoding, Method
from inference.benchmark.settings import (
    AUTOREGRESSIVE,
    COMPILED,
    DRAFTER,
    LOOKUP,
    OF_TRANSFORMERS,
    TRANSFORMERS,
    MethodName,
)
from inference.benchmark.transformers_methods import CompiledDecoding, TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.names import UntrainedName
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import default_tree
from inference.loading import build_second, build_untrained, combined_drafter
from inference.protocol import Drafter
from inference.trees.shape import TreePlan, Trees, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.pretrained import load_causal_lm

LOOKUP_TOKENS = (3, 5, 10)  # tokens drafted per forward pass; only the fastest setting is reported


class Subject(NamedTuple):
    """The target of a comparison, and how methods compute with it.

    Attributes:
        threads: number of threads; "auto" for the fastest number for each method, None for
            torch's current number.
        other_weights: whether trained drafters may have been trained for other weights of the
            target.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    threads: Threads = None
    other_weights: bool = False

    def decoder(
        self, drafter: JakiroDrafter | Drafter | None = None, tree: Trees = "auto"
    ) -> SpeculativeDecoder:
        """Return a decoder of the target."""
        return SpeculativeDecoder(
            self.model,
            drafter,
            self.tokenizer,
            tree,
            threads=self.threads,
            other_weights=self.other_weights,
        )


def build_methods(names: Sequence[MethodName], subject: Subject) -> list[Method]:
    """Return the methods.

    A method of which only the fastest setting is reported (such as prompt lookup) yields one
    `Method` per setting, all with the same `family`.
    """
    return [
        method
        for name in names
        for method in (_theirs if name.kind in OF_TRANSFORMERS else _ours)(name, subject)
    ]


def _theirs(name: MethodName, subject: Subject) -> Iterable[Method]:
    target = TargetAdapter(subject.model.eval())

    def build(setting: str, threads: int | None, **how: Any) -> TransformersDecoding:
        full = f"{name.name} ({setting})" if setting else name.name
        kind = CompiledDecoding if name.kind == COMPILED else TransformersDecoding
        return kind(full, name.kind, subject.model, name.name, threads=threads, **how)

    if name.kind in (TRANSFORMERS, COMPILED):
        # All numbers of threads that may be the fastest: a slow baseline would flatter the others.
        contending = contending_threads(target, subject.threads)
        for threads in contending if name.kind == TRANSFORMERS else contending[-1:]:
            is_named = threads is not None and name.kind == TRANSFORMERS
            yield build(f"threads={threads}" if is_named else "", threads)
        return
    threads = choose_threads(target, subject.threads, drafts=True)
    if name.kind == LOOKUP:
        for count in LOOKUP_TOKENS:
            how: dict[str, Any] = {"prompt_lookup_num_tokens": count}
            yield build(str(count), threads, note=f"prompt_lookup_num_tokens={count}", **how)
    else:
        yield build("", threads, assistant_model=_assistant(str(name.path), subject.model))


def _ours(name: MethodName, subject: Subject) -> Iterable[Method]:
    if name.kind == AUTOREGRESSIVE:
        yield JakiroDecoding(name.name, name.kind, subject.decoder())
    else:
        yield (_build_trained if name.kind == DRAFTER else _build_untrained)(name, subject)


def _build_trained(name: MethodName, subject: Subject) -> JakiroDecoding:
    drafter = JakiroDrafter.from_pretrained(str(name.path))
    tree = _trees(name, drafter)
    if name.second is None:
        return _with_repeats(name, subject, subject.decoder(drafter, tree))
    shapes = None if isinstance(tree, str) else tree
    both = _combine(name, drafter, subject, shapes)
    decoder = subject.decoder(both, "auto" if tree == "auto" else "fixed")
    return _with_repeats(name, subject, decoder)


def _trees(name: MethodName, drafter: JakiroDrafter) -> TreePlan | Literal["auto", "fixed"]:
    if name.tree == "auto":
        return "auto"
    if name.candidates is None and name.tree != "deterministic":
        return "fixed"
    if name.candidates is None:
        plan = default_tree(drafter)
    else:
        plan = trees_of_size(drafter, name.candidates, name.levels)
    return TreePlan.of(plan.greedy) if name.tree == "deterministic" else plan


def _build_untrained(name: MethodName, subject: Subject) -> JakiroDecoding:
    untrained = UntrainedName(name.kind, name.path, name.settings, name.candidates)
    drafter: Drafter = build_untrained(untrained, subject.model, subject.tokenizer)
    if name.second is not None:
        assert isinstance(drafter, SmallLMDrafter), "checked when the name was parsed"
        drafter = _combine(name, drafter, subject)
    decoder = subject.decoder(drafter, "auto" if name.tree == "auto" else "fixed")
    return _with_repeats(name, subject, decoder)


def _combine(
    name: MethodName,
    first: JakiroDrafter | SmallLMDrafter,
    subject: Subject,
    tree: TreeShape | TreePlan | None = None,
) -> CombinedDrafter:
    """Return the drafter of a method in which two drafters share the trees."""
    assert name.second is not None
    model, tokenizer = subject.model, subject.tokenizer
    second = build_second(name.second, model, tokenizer)
    return combined_drafter(
        first, second, model, tokenizer, tree=tree, other_weights=subject.other_weights
    )


def _with_repeats(
    name: MethodName, subject: Subject, decoder: SpeculativeDecoder
) -> JakiroDecoding:
    if name.merged_repeats is not None:
        assert decoder.drafter is not None, "rejected when the name was parsed"
        repeating = RepeatingDrafter(decoder.drafter, RepeatSettings(num_nodes=name.merged_repeats))
        decoder = subject.decoder(repeating, "auto" if name.tree == "auto" else "fixed")
    return JakiroDecoding(name.name, name.kind, decoder)


def _assistant(path: str, model: PreTrainedModel) -> PreTrainedModel:
    assistant = load_causal_lm(path, "the assistant", dtype=model.dtype, device=model.device)
    sizes = [one.config.get_text_config().vocab_size for one in (model, assistant)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the assistant {path} has a different vocabulary from the target: {sizes[1]} tokens "
            f"instead of {sizes[0]}"
        )
    return assistant
