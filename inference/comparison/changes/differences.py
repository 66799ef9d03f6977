"""What differs between two comparisons beside their figures, and makes these hard to compare."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from inference.comparison.document import ComparisonDocument
from inference.tree_shape import TreeShape


class Difference(NamedTuple):
    """Something that is not the same in both documents."""

    what: str
    before: str
    after: str
    is_serious: bool = False  # the figures are about different things


def find_differences(before: ComparisonDocument, after: ComparisonDocument) -> list[Difference]:
    """Return what makes it doubtful that figures of two documents can be compared.

    Another target comes first and is serious: its text, and so all figures, are others.
    """
    return [
        *_of_the_target(before, after),
        *_of_the_circumstances(before, after),
        *_of_the_prompts(before, after),
        *_of_the_trees(before, after),
    ]


# Versions of Jakiro itself and commits are left out: to compare them is what documents are for.
_CIRCUMSTANCES: dict[str, Callable[[ComparisonDocument], object]] = {
    "baseline": lambda document: document.baseline,
    "dtype": lambda document: document.environment.target.dtype,
    "device": lambda document: document.environment.device,
    "processor": lambda document: document.environment.processor,
    "number of CPUs": lambda document: document.environment.num_cpus,
    "threads": lambda document: document.environment.threads,
    "spin count": lambda document: document.environment.spin_count,
    "torch": lambda document: document.environment.versions.get("torch"),
    "transformers": lambda document: document.environment.versions.get("transformers"),
    "max_new_tokens": lambda document: document.settings.max_new_tokens,
    "batch_size": lambda document: document.settings.batch_size,
    "repeats": lambda document: document.settings.repeats,
    "seed": lambda document: document.settings.seed,
    "top_p": lambda document: document.settings.top_p,
    "top_k": lambda document: document.settings.top_k,
    "keep_state": lambda document: document.settings.keep_state,
}


def _of_the_target(before: ComparisonDocument, after: ComparisonDocument) -> Iterator[Difference]:
    old, new = before.environment.target, after.environment.target
    if old.fingerprint != new.fingerprint:
        first, second = (f"{one.name_or_path} ({one.fingerprint})" for one in (old, new))
        yield Difference("target", first, second, is_serious=True)


def _of_the_circumstances(
    before: ComparisonDocument, after: ComparisonDocument
) -> Iterator[Difference]:
    for what, value_of in _CIRCUMSTANCES.items():
        old, new = value_of(before), value_of(after)
        if old != new:
            yield Difference(what, _shown(old), _shown(new))


def _of_the_prompts(before: ComparisonDocument, after: ComparisonDocument) -> Iterator[Difference]:
    old, new = _prompts(before), _prompts(after)
    if old != new:
        yield Difference(
            "prompts", f"{len(old)}", f"{len(new)} ({len(old & new)} of them the same)"
        )


def _of_the_trees(before: ComparisonDocument, after: ComparisonDocument) -> Iterator[Difference]:
    trees = {(one.name, one.temperature): one.tree for one in before.methods}
    for one in after.methods:
        old = trees.get((one.name, one.temperature), one.tree)
        if old != one.tree:
            what = f"tree of {one.name} at T = {one.temperature:g}"
            yield Difference(what, _unlike(old, one.tree), _unlike(one.tree, old))


def _prompts(document: ComparisonDocument) -> set[str]:
    return {sample.prompt for one in document.methods for sample in one.samples}


def _unlike(tree: TreeShape | None, other: TreeShape | None) -> str:
    """Describe a tree by what the other one has not."""
    if tree is None:
        return "not fixed"
    known = {} if other is None else other.model_dump()
    values = tree.model_dump().items()
    return ", ".join(f"{key}={value}" for key, value in values if known.get(key) != value)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
