"""Loading of the target of a comparison, and construction of the compared methods."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.autotune.setup import Pair, trees_of_size
from inference.autotune.threads import Threads, choose_threads, contending_threads
from inference.benchmark.methods import JakiroDecoding, Method
from inference.benchmark.settings import (
    AUTOREGRESSIVE,
    COMPILED,
    DRAFTER,
    OF_TRANSFORMERS,
    TRANSFORMERS,
    MethodName,
)
from inference.benchmark.transformers_methods import CompiledDecoding, TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.drafters.names import UntrainedName
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from inference.drafters.trained.drafter import default_tree
from inference.loading import build_untrained, with_second
from inference.protocol import Drafter
from inference.trees.shape import TreePlan, Trees
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.wording import counted

LOOKUP_TOKENS = 10  # drafted per forward pass by transformers, unless a method says otherwise


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
        self, drafter: JakiroDrafter | Drafter | Pair | None = None, tree: Trees = "auto"
    ) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            self.model,
            drafter,
            self.tokenizer,
            tree,
            threads=self.threads,
            other_weights=self.other_weights,
        )


def build_methods(names: Sequence[MethodName], subject: Subject) -> list[Method]:
    """Return the methods; `transformers` becomes one for each number of threads to measure."""
    return [
        method
        for name in names
        for method in (_theirs if name.kind in OF_TRANSFORMERS else _ours)(name, subject)
    ]


def _theirs(name: MethodName, subject: Subject) -> Iterable[Method]:
    target = TargetAdapter(subject.model.eval())
    if name.kind in (TRANSFORMERS, COMPILED):
        # All numbers of threads that may be the fastest: a slow baseline would flatter the others.
        contending = contending_threads(target, subject.threads)
        if name.kind == COMPILED:
            yield CompiledDecoding(name.name, name.kind, subject.model, threads=contending[-1])
            return
        for threads in contending:
            full = name.name if threads is None else f"{name.name} ({counted(threads, 'thread')})"
            yield TransformersDecoding(full, name.kind, subject.model, name.name, threads=threads)
        return
    how: dict[str, Any] = {"prompt_lookup_num_tokens": int(name.path or LOOKUP_TOKENS)}
    threads = choose_threads(target, subject.threads, drafts=True)
    yield TransformersDecoding(name.name, name.kind, subject.model, threads=threads, **how)


def _ours(name: MethodName, subject: Subject) -> Iterable[Method]:
    if name.kind == AUTOREGRESSIVE:
        yield JakiroDecoding(name.name, name.kind, subject.decoder())
        return
    tree: Trees = "auto" if name.tree == "auto" else "fixed"
    both: JakiroDrafter | Drafter | Pair
    if name.kind == DRAFTER:
        both = drafter = JakiroDrafter.from_pretrained(str(name.path))
        decoder_tree: Trees = _trees(name, drafter)
    else:
        untrained = UntrainedName(name.kind, name.path, name.settings, name.candidates)
        both, decoder_tree = build_untrained(untrained, subject.model, subject.tokenizer), tree
    if name.second is not None:
        both = with_second(both, name.second, subject.model, subject.tokenizer)
    decoder = subject.decoder(both, decoder_tree)
    if name.merged_repeats is not None:
        assert decoder.drafter is not None, "rejected when the name was parsed"
        repeats = RepeatSettings(num_nodes=name.merged_repeats)
        decoder = subject.decoder(RepeatingDrafter(decoder.drafter, repeats), tree)
    yield JakiroDecoding(name.name, name.kind, decoder)


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
