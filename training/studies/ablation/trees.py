"""The draft trees that arms are measured with, as a caller names them."""

from collections.abc import Sequence

from inference.benchmark.method_names import DRAFTER, MethodName, parse_methods
from inference.benchmark.tree_trial import TRIAL_PROMPTS
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings


class Trees(Settings):
    """One kind of trees, the same for all arms.

    Attributes:
        options: of a method of `jakiro bench`, such as `tree=chosen,candidates=60`.
        label: what tells them apart, such as `chosen-60`; None where there is only one kind.
    """

    options: str
    label: str | None = None

    def method(self, arm: str) -> str:
        """Return the name of an arm with these trees in a document; no arm has an @ in its name."""
        return arm if self.label is None else f"{arm}@{self.label}"


def parse_trees(texts: Sequence[str], candidates: int) -> tuple[Trees, ...]:
    """Return the trees that a caller asks for.

    Args:
        texts: options of a drafter as for `jakiro bench`, without a name; none for the trees of the
            drafter's schedule with so many candidates.
        candidates: of these.

    Raises:
        ConfigError: options are malformed, or given twice.
    """
    if not texts:
        return (Trees(options=f"candidates={candidates}"),)
    trees = tuple(Trees(options=text, label=_label(text)) for text in texts)
    parse_methods([f"{DRAFTER}=any,{one.options},name={one.label}" for one in trees])
    return trees


def prompts_to_choose_on(trees: Sequence[Trees]) -> int:
    """Return how many prompts are not reported on, for costs choose trees on them."""
    return TRIAL_PROMPTS if any_by_costs(trees) else 0


def any_by_costs(trees: Sequence[Trees]) -> bool:
    """Return whether measured costs choose trees, each arm its own."""
    return any(_parsed(one.options).candidates == "costs" for one in trees)


def identity(trees: Sequence[Trees]) -> object:
    """Return what tells trees from others: of the usual ones their number, else all options."""
    if trees[0].label is None:
        return _parsed(trees[0].options).candidates
    return [[one.label, one.options] for one in trees]


def _label(text: str) -> str:
    parts = text.split(",")
    if not all(part.startswith(("tree=", "candidates=", "levels=")) for part in parts):
        raise ConfigError(
            f"--trees {text} cannot be used",
            expected="tree=..., candidates=... and levels=..., or some of them",
            got=text,
            remedy="see the methods of `jakiro bench --help`",
        )
    return "-".join(part.partition("=")[2] for part in parts)


def _parsed(options: str) -> MethodName:
    (method,) = parse_methods([f"{DRAFTER}=any,{options}"])
    return method
