"""Loading of the target of a comparison, and construction of the compared methods."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.autotune.setup import trees_of_size
from inference.autotune.threads import Threads, choose_threads, contending_threads
from inference.benchmark.method_names import (
    AUTOREGRESSIVE,
    COMPILED,
    DRAFTER,
    LOOKUP,
    OF_TRANSFORMERS,
    TRANSFORMERS,
    MethodName,
)
from inference.benchmark.methods import Method, OwnDecoding
from inference.benchmark.transformers_methods import CompiledDecoding, TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
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
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.settings import load_settings

LOOKUP_TOKENS = (3, 5, 10)  # tokens drafted per forward pass; only the fastest setting is reported


def load_target(
    name_or_path: str, dtype: str | torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer."""
    model = load_causal_lm(name_or_path, dtype=dtype, device=device)
    return model, load_tokenizer(name_or_path, "the tokenizer of the target")


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

    def transformers(
        self, name: MethodName, setting: str = "", threads: int | None = None, **how: Any
    ) -> TransformersDecoding:
        """Return a method of transformers.

        Args:
            setting: what distinguishes the method from others of the same name.
            **how: as for `TransformersDecoding`.
        """
        own = f"{name.name} ({setting})" if setting else name.name
        kind = CompiledDecoding if name.kind == COMPILED else TransformersDecoding
        return kind(own, name.kind, self.model, name.name, threads=threads, **how)

    @property
    def drafting_threads(self) -> int | None:
        """The number of threads with which transformers decodes with drafts."""
        return choose_threads(self._target, self.threads, drafts=True)

    @property
    def contending_threads(self) -> list[int | None]:
        """The numbers of threads with which transformers is measured without drafts.

        If `threads` is "auto", these are the numbers that may be the fastest, so that the baseline
        is not reported with a slow one.
        """
        return contending_threads(self._target, self.threads)

    @property
    def _target(self) -> TargetAdapter:
        return TargetAdapter(self.model.eval())


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
    if name.kind == TRANSFORMERS:
        for threads in subject.contending_threads:
            setting = "" if threads is None else f"threads={threads}"
            yield subject.transformers(name, setting, threads)
    elif name.kind == COMPILED:
        yield subject.transformers(name, threads=subject.contending_threads[-1])
    elif name.kind == LOOKUP:
        threads = subject.drafting_threads
        for count in LOOKUP_TOKENS:
            how: dict[str, Any] = {"prompt_lookup_num_tokens": count}
            note = f"prompt_lookup_num_tokens={count}"
            yield subject.transformers(name, str(count), threads, note=note, **how)
    else:
        assistant = _assistant(str(name.path), subject.model)
        threads = subject.drafting_threads
        yield subject.transformers(name, threads=threads, assistant_model=assistant)


def _ours(name: MethodName, subject: Subject) -> Iterable[Method]:
    if name.kind == AUTOREGRESSIVE:
        yield OwnDecoding(name.name, name.kind, subject.decoder())
    else:
        yield (_drafted if name.kind == DRAFTER else _untrained)(name, subject)


def _drafted(name: MethodName, subject: Subject) -> OwnDecoding:
    drafter = JakiroDrafter.from_pretrained(str(name.path))
    tree = _trees(name, drafter)
    if name.second is None:
        return _with_repeats(name, subject, subject.decoder(drafter, tree))
    shapes = None if isinstance(tree, str) else tree
    both = _combined(name, drafter, subject, shapes)
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


def _untrained(name: MethodName, subject: Subject) -> OwnDecoding:
    untrained = UntrainedName(name.kind, name.path, name.settings, name.candidates)
    drafter: Drafter = build_untrained(untrained, subject.model, subject.tokenizer)
    if name.second is not None:
        assert isinstance(drafter, SmallLMDrafter), "checked when the name was parsed"
        drafter = _combined(name, drafter, subject)
    decoder = subject.decoder(drafter, "auto" if name.tree == "auto" else "fixed")
    return _with_repeats(name, subject, decoder)


def _combined(
    name: MethodName,
    first: JakiroDrafter | SmallLMDrafter,
    subject: Subject,
    tree: TreeShape | TreePlan | None = None,
) -> CombinedDrafter:
    """Return the drafter of a method in which two drafters share the trees."""
    assert name.second is not None
    model, tokenizer = subject.model, subject.tokenizer
    second = build_second(name.second, model, tokenizer, name.second_settings)
    sharing = None
    if name.pair_settings is not None:
        sharing = load_settings(CombinedSettings, name.pair_settings)
    return combined_drafter(
        first, second, model, tokenizer, sharing, tree, other_weights=subject.other_weights
    )


def _with_repeats(name: MethodName, subject: Subject, decoder: SpeculativeDecoder) -> OwnDecoding:
    if name.merged_repeats is not None:
        assert decoder.drafter is not None, "rejected when the name was parsed"
        repeating = RepeatingDrafter(decoder.drafter, RepeatSettings(num_nodes=name.merged_repeats))
        decoder = subject.decoder(repeating, "auto" if name.tree == "auto" else "fixed")
    return OwnDecoding(name.name, name.kind, decoder)


def _assistant(path: str, model: PreTrainedModel) -> PreTrainedModel:
    assistant = load_causal_lm(path, "the assistant", dtype=model.dtype, device=model.device)
    own, other = (each.config.get_text_config().vocab_size for each in (model, assistant))
    if own != other:
        raise ConfigError(
            f"the assistant {path} has a different vocabulary from the target",
            expected=f"a vocabulary of {own} tokens",
            got=other,
            remedy="use an assistant with the target's tokenizer",
        )
    return assistant
