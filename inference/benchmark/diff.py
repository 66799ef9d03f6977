"""Changes between two results of `jakiro bench`, with intervals over prompts, and their table."""

from math import isnan
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.report.style import fixed
from inference.benchmark.stats import (
    FEWEST_PROMPTS,
    Floats,
    Interval,
    divided,
    interval_of,
    pooled_ratio,
    resample_counts,
    sums_by_unit,
)
from jakiro.errors import DataError
from jakiro.utils.wording import counted

Metric = Literal["tau", "speedup", "tokens_per_second"]
Finding = Literal["higher", "lower", "faster", "slower", "not distinguishable"]
Verdict = Literal[Finding, "drifts with the machine", "too few prompts", "undefined"]
Difference = tuple[str, object, object]  # a setting or fact, with its values before and after
_ENVIRONMENT = ("device", "processor", "num_cpus", "threads", "spin_count")
_SETTINGS = ("max_new_tokens", "batch_size", "repeats", "seed", "top_p", "top_k", "keep_state")
_OPTIONS = ("threads", "packed", "other_weights")  # settings whose options have the same names
_LABELS = {"tau": "tau", "speedup": "speed-up", "tokens_per_second": "tokens/s"}
_STYLES = {"higher": "green", "faster": "green", "lower": "red", "slower": "red"}
_UNKNOWN = {"too few prompts": ("", "-"), "undefined": ("", "undefined")}  # last two columns
_UNPAIRED = " (the prompts were decoded in different groups)"
_COLUMNS = "{:10}{:>9}{:>9}{:>7}  {:13}  {}"


class Side(NamedTuple):
    """Figures of a method and of the baseline of its document at the same temperature."""

    figures: MethodFigures
    baseline: MethodFigures | None  # None if the baseline was not measured

    def units(self) -> dict[str, str]:
        """Return each prompt's resampling unit, named after the prompts decoded together."""
        members: dict[int, set[str]] = {}
        for sample in self.figures.samples:
            members.setdefault(sample.group, set()).add(sample.prompt)
        groups = members.values()
        return {prompt: " ".join(sorted(group)) for group in groups for prompt in group}

    def resampled(self, stream: int) -> dict[Metric, Floats]:
        """Return each figure as an array: the measured value, then the value in every resample.

        Args:
            stream: number of the random stream; paired sides use the same number.
        """
        units = self.units()
        index_of = {unit: index for index, unit in enumerate(sorted(set(units.values())))}
        resamples = np.vstack([np.ones(len(index_of)), resample_counts(len(index_of), stream)])

        def pooled(figures: MethodFigures, *names: str) -> Floats:
            samples = [(units[sample.prompt], sample) for sample in figures.samples]
            parts = (
                [(unit, float(getattr(sample, name))) for unit, sample in samples] for name in names
            )
            top, bottom = (sums_by_unit(part, index_of) for part in parts)
            return pooled_ratio(top, bottom, resamples)

        speed = pooled(self.figures, "tokens", "seconds")
        # The first token of every chat turn comes from prefill and is not a decoded token.
        values: dict[Metric, Floats] = {"tau": pooled(self.figures, "decoded", "target_forwards")}
        if self.baseline is not None and self.baseline is not self.figures:
            values["speedup"] = divided(speed, pooled(self.baseline, "tokens", "seconds"))
        values["tokens_per_second"] = speed
        return values


class MethodKey(NamedTuple):
    """A method at a temperature."""

    name: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.name} at T = {self.temperature:g}"


class FigureChange(NamedTuple):
    """A figure in both documents, with the 95% bootstrap interval of after / before."""

    metric: Metric
    before: float
    after: float
    ratio: Interval  # NaN if the first document's figure is zero or undefined
    verdict: Verdict


class MethodChange(NamedTuple):
    """The changes of a method that both documents contain."""

    key: MethodKey
    # whether both have the same groups of prompts; their difficulty then cancels in the ratio
    is_paired: bool
    figures: tuple[FigureChange, ...]


class Changes(NamedTuple):
    """The changes of all methods, and other differences between two documents."""

    # methods whose greedy tokens equal the target's in the first document, but not in the second
    no_longer_identical: tuple[MethodKey, ...]
    methods: tuple[MethodChange, ...]
    only_in: list[tuple[str, MethodKey]]  # "before" or "after", and a method of only that document
    differences: list[Difference]  # differences in the machine, versions, settings and trees


def compare_documents(before: ComparisonDocument, after: ComparisonDocument) -> Changes:
    """Return the changes from one document to another.

    Args:
        before: first document.
        after: second document, with the same target and prompts.

    Raises:
        DataError: the documents have different targets or prompts, or no method in common.
    """
    old, new = _sides(before), _sides(after)
    _check_comparable(before, after)
    both = [key for key in new if key in old]
    if not both:
        raise _mismatch("no method in common", ", ".join(map(str, old)), ", ".join(map(str, new)))
    is_identical = attrgetter("figures.identical_to_target")  # None if not compared
    return Changes(
        tuple(key for key in both if is_identical(old[key]) and is_identical(new[key]) is False),
        tuple(_change(key, old[key], new[key]) for key in both),
        [("before", key) for key in old if key not in new]
        + [("after", key) for key in new if key not in old],
        _differences(before, after),
    )


def _sides(document: ComparisonDocument) -> dict[MethodKey, Side]:
    found = {MethodKey(method.name, method.temperature): method for method in document.methods}
    return {
        key: Side(method, found.get(key._replace(name=document.baseline)))
        for key, method in found.items()
    }


def _change(key: MethodKey, before: Side, after: Side) -> MethodChange:
    is_paired = before.units() == after.units()
    old, new = before.resampled(stream=0), after.resampled(stream=0 if is_paired else 1)
    num_units = min(len(set(side.units().values())) for side in (before, after))
    figures = []
    for metric in (metric for metric in old if metric in new):
        ratios = divided(new[metric], old[metric])
        ratio = interval_of(float(ratios[0]), ratios[1:])
        values = float(old[metric][0]), float(new[metric][0])
        figures.append(FigureChange(metric, *values, ratio, _verdict(metric, ratio, num_units)))
    return MethodChange(key, is_paired, tuple(figures))


def _verdict(metric: Metric, ratio: Interval, num_units: int) -> Verdict:
    if isnan(ratio.value):
        return "undefined"
    if num_units < FEWEST_PROMPTS:
        return "too few prompts"
    if metric == "tokens_per_second":
        return "drifts with the machine"
    if ratio.low <= 1 <= ratio.high:
        return "not distinguishable"
    if metric == "tau":
        return "higher" if ratio.low > 1 else "lower"
    return "faster" if ratio.low > 1 else "slower"


def _check_comparable(before: ComparisonDocument, after: ComparisonDocument) -> None:
    """Raise an error if the documents have different targets or prompts."""
    targets = [document.environment.target for document in (before, after)]
    if targets[0].fingerprint != targets[1].fingerprint:
        described = [f"{target.name_or_path} ({target.fingerprint})" for target in targets]
        raise _mismatch("different targets", *described)
    old, new = (
        {sample.prompt for method in document.methods for sample in method.samples}
        for document in (before, after)
    )
    if old != new:
        shared = f"{counted(len(new), 'prompt')}, of which {len(old & new)} are in both files"
        raise _mismatch("different prompts", counted(len(old), "prompt"), shared)


def _mismatch(what: str, before: str, after: str) -> DataError:
    return DataError(
        f"the two results cannot be compared: they have {what}",
        expected=f"{before}, as in the first file",
        got=after,
        remedy="use the same --target and --prompts and at least one common --method for both",
    )


def _differences(before: ComparisonDocument, after: ComparisonDocument) -> list[Difference]:
    """Return the differences in the machine, versions, settings and trees."""
    old, new = _facts(before), _facts(after)
    both = [name for name in new if name in old]  # leaves out trees of only one document
    return [(name, old[name], new[name]) for name in both if old[name] != new[name]]


def _facts(document: ComparisonDocument) -> dict[str, Any]:
    machine = document.environment
    return (
        {"baseline": document.baseline, "dtype": machine.target.dtype}
        | {name: getattr(machine, name) for name in _ENVIRONMENT}
        | {name: machine.versions.get(name) for name in ("torch", "transformers")}
        | {name: getattr(document.settings, name) for name in _SETTINGS}
        | {f"--{name.replace('_', '-')}": getattr(document.settings, name) for name in _OPTIONS}
        | {
            f"tree of {MethodKey(method.name, method.temperature)}": method.tree
            for method in document.methods
        }
    )


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
