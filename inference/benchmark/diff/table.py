"""A table of the changes between two results."""

from rich.console import Console
from rich.text import Text

from inference.benchmark.diff.change import Changes, FigureChange
from inference.benchmark.report.style import fixed
from inference.benchmark.stats import FEWEST_PROMPTS

_LABELS = {"tau": "tau", "speedup": "speed-up", "tokens_per_second": "tokens/s"}
_STYLES = {"higher": "green", "faster": "green", "lower": "red", "slower": "red"}
_UNKNOWN = {"too few prompts": ("", "-"), "undefined": ("", "undefined")}  # last two columns
_UNPAIRED = " (the prompts were decoded in different groups)"
_COLUMNS = "{:10}{:>9}{:>9}{:>7}  {:13}  {}"


def show_changes(changes: Changes, console: Console) -> None:
    """Print the methods that are no longer lossless, the figures, and other differences.

    Args:
        changes: changes between two results.
        console: console to print on.
    """

    def say(text: str, style: str) -> None:
        # `Text` is used because brackets in a name would be read as markup in a plain string.
        console.print(Text(text, style=style), soft_wrap=True)

    for key in changes.no_longer_identical:
        say(f"NO LONGER LOSSLESS: the tokens of {key} differ from the target's", "red")
    say("ratio: after / before, with its 95% interval over prompts", "italic")
    say(_COLUMNS.format("", "before", "after", "ratio", "interval", "verdict"), "bold")
    for method in changes.methods:
        say(f"{method.key}{'' if method.is_paired else _UNPAIRED}", "bold")
        for figure in method.figures:
            say(_row(figure), _STYLES.get(figure.verdict, "dim"))
    if any(f.verdict == "too few prompts" for m in changes.methods for f in m.figures):
        say(f"Intervals and verdicts need at least {FEWEST_PROMPTS} prompts.", "dim")
    for when, key in changes.only_in:
        say(f"Only {when}: {key}", "")
    for name, before, after in changes.differences:
        say(f"{name}: {before} before, {after} after", "yellow")
    say("Tokens/s depend on the load of the machine; compare speed-ups instead.", "dim")


def _row(figure: FigureChange) -> str:
    metric, before, after, ratio, verdict = figure
    known = (f"{ratio.low:.3f} - {ratio.high:.3f}", verdict)
    values = (fixed(before), fixed(after), fixed(ratio.value, 3), *_UNKNOWN.get(verdict, known))
    return _COLUMNS.format(f"  {_LABELS[metric]}", *values)
