"""What changed between two comparisons, for people to read."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.comparison.change import Changes, FigureChange, MethodChange, MethodKey, Verdict
from inference.comparison.differences import Difference

_LABELS = {"tau": "tau", "speedup": "speed-up", "tokens_per_second": "tokens/s"}
_STYLES: dict[Verdict, str] = {
    "higher": "green",
    "faster": "green",
    "lower": "red",
    "slower": "red",
    "within noise": "dim",
    "too few prompts": "yellow",
    "undefined": "yellow",
}
_SHARE_BY_CHANCE = 0.05  # share of 95% intervals that miss the truth


def show_changes(changes: Changes, console: Console) -> None:
    """Print what changed: first what is wrong now, then the figures and what they are worth."""
    for line in _alarms(changes):
        console.print(line)
    if changes.methods:
        console.print(_table(changes.methods))
    for what, keys in (("before", changes.only_before), ("after", changes.only_after)):
        if keys:
            console.print(Text(f"Only {what}: {', '.join(map(_named, keys))}."))
    for line in _doubts(changes.differences):
        console.print(line)
    for sentence in _cautions(changes):
        console.print(Text(sentence, style="dim"))


def _alarms(changes: Changes) -> Iterable[Text]:
    for key in changes.no_longer_identical:
        yield Text(
            f"NOT LOSSLESS ANY MORE: {_named(key)} wrote the target's own tokens before and others "
            "now.",
            style="bold red",
        )
    for one in changes.differences:
        if one.is_serious:
            yield Text(
                f"ANOTHER {one.what.upper()}: {one.before} before, {one.after} after; the ratios "
                "below compare different things.",
                style="bold red",
            )


def _table(methods: Iterable[MethodChange]) -> Table:
    """Return a line for every method, with its figures below; names are long and may fold."""
    table = Table(
        title="after / before, with 95% intervals over prompts",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", overflow="fold")
    for name in ("before", "after", "ratio"):
        table.add_column(name, no_wrap=True, justify="right")
    for name in ("interval", "verdict"):
        table.add_column(name, no_wrap=True)
    for method in methods:
        others = "" if method.is_paired else ", other prompts"
        # `Text`, since a name may hold brackets, which mean markup in plain strings.
        table.add_row(Text(f"{_named(method.key)}{others}", style="bold"))
        for figure in method.figures:
            table.add_row(*_row(figure))
        table.add_section()
    return table


def _row(figure: FigureChange) -> list[Text]:
    ratio = figure.ratio
    return [
        Text(f"  {_LABELS[figure.metric]}"),
        Text(f"{figure.before:.2f}"),
        Text(f"{figure.after:.2f}"),
        Text(f"{ratio.value:.3f}"),
        Text(f"{ratio.low:.3f} - {ratio.high:.3f}"),
        Text(figure.verdict, style=_STYLES[figure.verdict]),
    ]


def _doubts(differences: Iterable[Difference]) -> Iterable[Text]:
    doubts = [one for one in differences if not one.is_serious]
    if doubts:
        yield Text("What else differs and may explain a change:", style="yellow")
    for one in doubts:
        yield Text(f"  {one.what}: {one.before} before, {one.after} after")


def _cautions(changes: Changes) -> Iterable[str]:
    if not changes.methods:
        yield "No method was measured in both."
        return
    yield (
        "tau: tokens per target forward. Tokens/s of different runs drift with the machine and its "
        "other work; speed-ups are within a run, so compare those. The intervals hold the noise "
        "between prompts, not that drift."
    )
    if changes.num_intervals:
        by_chance = _SHARE_BY_CHANCE * changes.num_intervals
        yield (
            f"Of {changes.num_intervals} intervals about {by_chance:.1f} exclude 1 by chance (5%; "
            "about 10% of those over fewer than 20 prompts)."
        )
    if not all(method.is_paired for method in changes.methods):
        yield "Where prompts differ, so may how easy they are: such a change may be theirs."


def _named(key: MethodKey) -> str:
    return f"{key.name} at T = {key.temperature:g}"
