"""Kinds of draft trees with which the arms of a study are measured."""

from collections.abc import Sequence

from inference.benchmark.method_names import DRAFTER, MethodName, parse_methods
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings


class Trees(Settings):
    """One kind of trees with which every arm is measured.

    Attributes:
        options: options of a drafter in `jakiro bench`, such as `tree=deterministic,candidates=60`.
        label: name of the kind, such as `deterministic-60`; None for the default trees.
    """

    options: str
    label: str | None = None

    def method(self, arm: str) -> str:
        """Return the name of the benchmark method that measures an arm with these trees."""
        return arm if self.label is None else f"{arm}@{self.label}"


def parse_trees(texts: Sequence[str], candidates: int) -> tuple[Trees, ...]:
    """Return the kinds of trees that a user specified.

    Args:
        texts: options of a drafter in `jakiro bench` for each kind; empty for the drafter's default
            trees with `candidates` nodes.
        candidates: number of nodes of a tree if `texts` is empty.

    Raises:
        ConfigError: the options of a kind are malformed, or two kinds have the same label.
    """
    if not texts:
        return (Trees(options=f"candidates={candidates}"),)
    trees = tuple(Trees(options=text, label=_label(text)) for text in texts)
    parse_methods([f"{DRAFTER}=any,{kind.options},name={kind.label}" for kind in trees])
    return trees


def trees_key(trees: Sequence[Trees]) -> object:
    """Return a value that identifies the trees.

    For the default trees, the value is their number of candidates. For trees that the user
    specified, it contains the options of each kind.
    """
    if trees[0].label is None:
        return _parsed(trees[0].options).candidates
    return [[kind.label, kind.options] for kind in trees]


def _label(text: str) -> str:
    parts = text.split(",")
    if not all(part.startswith(("tree=", "candidates=", "levels=")) for part in parts):
        raise ConfigError(
            f"--trees {text} cannot be used",
            expected="one or more of tree=..., candidates=... and levels=...",
            got=text,
            remedy="see the methods of `jakiro bench --help`",
        )
    return "-".join(part.partition("=")[2] for part in parts)


def _parsed(options: str) -> MethodName:
    (method,) = parse_methods([f"{DRAFTER}=any,{options}"])
    return method
