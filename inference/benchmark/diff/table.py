"""A table of the changes between two results."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from inference.benchmark.diff.change import Changes, FigureChange
from inference.benchmark.report.style import fixed
from inference.benchmark.stats import FEWEST_PROMPTS

_LABELS = {"tau": "tau", "speedup": "speed-up", "tokens_per_second": "tokens/s"}
_STYLES = {"higher": "green", "faster": "green", "lower": "red", "slower": "red"}
_COLUMNS = "{:10}{:>9}{:>9}{:>7}  {:13}  {}"


def show_changes(changes: Changes, console: Console) -> None:
    """Print the methods that are no longer lossless, the figures, and other differences.

    Args:
        changes: changes between two results.
        console: console to print on.
    """
    for text, style in (*_figures(changes), *_differences(changes)):
        # `Text` is used because brackets in a name would be read as markup in a plain string.
        console.print(Text(text, style=style), soft_wrap=True)


def _figures(changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield lines about the methods of both results, each with its style."""
    for key in changes.no_longer_identical:
        yield f"NO LONGER LOSSLESS: the tokens of {key} differ from the target's", "red"
    yield "after / before, with 95% intervals over prompts", "italic"
    yield _COLUMNS.format("", "before", "after", "ratio", "interval", "verdict"), "bold"
    for method in changes.methods:
        yield f"{method.key}{'' if method.is_paired else ', not paired'}", "bold"
        for figure in method.figures:
            yield _row(figure), _STYLES.get(figure.verdict, "dim")
    if any(f.verdict == "too few prompts" for m in changes.methods for f in m.figures):
        yield f"Intervals and verdicts need at least {FEWEST_PROMPTS} prompts.", "dim"


def _differences(changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield lines about what else differs between the results, each with its style."""
    for when, keys in (("before", changes.only_before), ("after", changes.only_after)):
        if keys:
            yield f"Only {when}: {', '.join(map(str, keys))}", ""
    for difference in changes.differences:
        text = f"{difference.name}: {difference.before} before, {difference.after} after"
        yield text, "yellow"
    yield "Tokens/s depend on the load of the machine; compare speed-ups instead.", "dim"


def _row(figure: FigureChange) -> str:
    ratio = figure.ratio
    is_known = figure.verdict not in ("too few prompts", "undefined")
    interval = f"{ratio.low:.3f} - {ratio.high:.3f}" if is_known else ""
    values = (fixed(figure.before), fixed(figure.after), fixed(ratio.value, 3))
    return _COLUMNS.format(f"  {_LABELS[figure.metric]}", *values, interval, figure.verdict)
