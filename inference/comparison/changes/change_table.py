"""What changed between two comparisons, for people to read."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from inference.comparison.changes.change import (
    Changes,
    FigureChange,
    MethodChange,
    MethodKey,
    Verdict,
)
from inference.comparison.changes.differences import Difference
from inference.comparison.changes.side import Pairing
from inference.comparison.page.wording import fixed

_LABELS = {"tau": "tau", "speedup": "speed-up", "tokens_per_second": "tokens/s"}
_STYLES: dict[Verdict, str] = {
    "higher": "green",
    "faster": "green",
    "lower": "red",
    "slower": "red",
    "within noise": "dim",
    "drifts with the machine": "dim",
    "too few prompts": "yellow",
    "undefined": "yellow",
}
_COLUMNS = "{:10}{:>9}{:>9}{:>7}  {:13}  {}"
_SHARE_BY_CHANCE = 0.05  # share of 95% intervals that miss the truth


def show_changes(changes: Changes, console: Console) -> None:
    """Print what changed: first what is wrong now, then the figures and what they are worth."""
    for line in _alarms(changes):
        console.print(line)
    if changes.methods:
        for line in _table(changes.methods):
            console.print(line, soft_wrap=True)
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
    for shared in sorted(_unlike(changes.methods)):
        yield Text(
            f"OTHER PROMPTS: {shared} are in both and cannot be compared by themselves; the ratios "
            "below compare different prompts, which may be easier or harder.",
            style="bold red",
        )


def _unlike(methods: Iterable[MethodChange]) -> set[int]:
    """Return how many prompts are shared where that is too few to compare the same ones."""
    pairings = (method.pairing for method in methods)
    return {one.num_shared for one in pairings if one.kind == "other prompts"}


def _table(methods: Iterable[MethodChange]) -> Iterator[Text]:
    """Yield a heading for every method, with its figures below: names are long, figures are not."""
    yield Text("after / before, with 95% intervals over prompts", style="italic")
    yield Text(_COLUMNS.format("", "before", "after", "ratio", "interval", "verdict"), style="bold")
    for method in methods:
        # `Text`, since a name may hold brackets, which mean markup in plain strings.
        yield Text(f"{_named(method.key)}{_prompts(method.pairing)}", style="bold")
        yield from map(_row, method.figures)


def _prompts(pairing: Pairing) -> str:
    """Return which prompts are compared, unless they are all those of both documents."""
    if pairing.kind == "shared":
        return f", on the {pairing.num_shared} prompts that both have"
    return "" if pairing.kind == "all" else f", {pairing.kind}"


def _row(figure: FigureChange) -> Text:
    ratio = figure.ratio
    is_known = figure.verdict not in ("too few prompts", "undefined")
    interval = f"{ratio.low:.3f} - {ratio.high:.3f}" if is_known else ""
    values = (fixed(figure.before), fixed(figure.after), fixed(ratio.value, 3))
    row = _COLUMNS.format(f"  {_LABELS[figure.metric]}", *values, interval, "")
    return Text(row).append(figure.verdict, style=_STYLES[figure.verdict])


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
        "other work, so that they get no verdict; speed-ups are within a run, so compare those. "
        "The intervals hold the noise between prompts, not that drift."
    )
    if changes.num_intervals:
        by_chance = _SHARE_BY_CHANCE * changes.num_intervals
        yield (
            f"Intervals that could exclude 1 by chance: {changes.num_intervals}; about "
            f"{by_chance:.2g} of them will (5%; about 10% of those over fewer than 20 prompts)."
        )
    kinds = {method.pairing.kind for method in changes.methods}
    if "shared" in kinds:
        yield (
            "Where documents share only some of their prompts, all values are of the shared ones "
            "and differ from those of the documents."
        )
    if "other groups" in kinds:
        yield (
            "Prompts that were decoded together share their seconds. Other groups of them are not "
            "paired, and known less well."
        )


def _named(key: MethodKey) -> str:
    return f"{key.name} at T = {key.temperature:g}"
