"""A table of the changes between two results."""

from rich.console import Console
from rich.text import Text

from inference.benchmark.diff.change import Changes, FigureChange
from inference.benchmark.report.style import fixed

_LABELS = {"tau": "tau", "speedup": "speed-up", "tokens_per_second": "tokens/s"}
_STYLES = {"higher": "green", "faster": "green", "lower": "red", "slower": "red"}
_COLUMNS = "{:10}{:>9}{:>9}{:>7}  {:13}  {}"


def show_changes(changes: Changes, console: Console) -> None:
    """Print the methods that are no longer lossless, the figures, and other differences.

    Args:
        changes: changes between two results.
        console: console to print on.
    """

    def show(text: str, style: str = "") -> None:
        # `Text` is used because brackets in a name would be read as markup in a plain string.
        console.print(Text(text, style=style), soft_wrap=True)

    for key in changes.no_longer_identical:
        show(f"NO LONGER LOSSLESS: the tokens of {key} differ from the target's", "red")
    show("after / before, with 95% intervals over prompts", "italic")
    show(_COLUMNS.format("", "before", "after", "ratio", "interval", "verdict"), "bold")
    for method in changes.methods:
        show(f"{method.key}{'' if method.is_paired else ', not paired'}", "bold")
        for figure in method.figures:
            show(_row(figure), _STYLES.get(figure.verdict, "dim"))
    for when, keys in (("before", changes.only_before), ("after", changes.only_after)):
        if keys:
            show(f"Only {when}: {', '.join(map(str, keys))}")
    for difference in changes.differences:
        text = f"{difference.name}: {difference.before} before, {difference.after} after"
        show(text, "yellow")
    show("Tokens/s depend on the load of the machine; compare speed-ups instead.", "dim")


def _row(figure: FigureChange) -> str:
    ratio = figure.ratio
    is_known = figure.verdict not in ("too few prompts", "undefined")
    interval = f"{ratio.low:.3f} - {ratio.high:.3f}" if is_known else ""
    values = (fixed(figure.before), fixed(figure.after), fixed(ratio.value, 3))
    return _COLUMNS.format(f"  {_LABELS[figure.metric]}", *values, interval, figure.verdict)
