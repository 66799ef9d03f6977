"""What changed between two results of `jakiro bench`, and whether it is beyond noise."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan
from typing import Literal, NamedTuple

from inference.bench.intervals import Interval
from inference.comparison.bootstrap import (
    Floats,
    divided,
    draws,
    interval_of,
    pooled_ratio,
    sums_by_unit,
)
from inference.comparison.differences import Difference, find_differences
from inference.comparison.document import ComparisonDocument, MethodFigures

FEWEST_PROMPTS = 5  # of fewer, an interval that excludes 1 comes by chance too often

Metric = Literal["tau", "speedup", "tokens_per_second"]
Verdict = Literal[
    "higher", "lower", "faster", "slower", "within noise", "too few prompts", "undefined"
]


class MethodKey(NamedTuple):
    """A method at a temperature."""

    name: str
    temperature: float


@dataclass(frozen=True)
class FigureChange:
    """One figure before and after, and their ratio.

    Attributes:
        metric: which figure of `MethodFigures`.
        before: its value in the first document.
        after: its value in the second one.
        ratio: after / before with its 95% bootstrap interval over prompts; NaN if before is zero.
        verdict: whether the interval excludes 1, and where it lies then.
    """

    metric: Metric
    before: float
    after: float
    ratio: Interval
    verdict: Verdict


@dataclass(frozen=True)
class MethodChange:
    """The figures of one method that both documents have.

    Attributes:
        key: the method and its temperature.
        is_paired: both documents have the same prompts, so that what makes a prompt easy cancels.
        figures: the baseline has no speed-up.
    """

    key: MethodKey
    is_paired: bool
    figures: tuple[FigureChange, ...]


@dataclass(frozen=True)
class Changes:
    """All that two documents tell of each other.

    Attributes:
        no_longer_identical: methods whose tokens were those of transformers and are not any more.
        methods: figures of the methods that both have, in the order of the second one.
        only_before: methods that only the first one has.
        only_after: methods that only the second one has.
        differences: what else differs and makes a comparison doubtful.
    """

    no_longer_identical: tuple[MethodKey, ...]
    methods: tuple[MethodChange, ...]
    only_before: tuple[MethodKey, ...]
    only_after: tuple[MethodKey, ...]
    differences: tuple[Difference, ...]

    @property
    def num_intervals(self) -> int:
        """Intervals that could have excluded 1 by chance."""
        verdicts = [figure.verdict for one in self.methods for figure in one.figures]
        return sum(verdict not in ("too few prompts", "undefined") for verdict in verdicts)


def compare_documents(before: ComparisonDocument, after: ComparisonDocument) -> Changes:
    """Return what changed from one document to another.

    Tokens per second of different runs drift with the machine; speed-ups, which are ratios within a
    run, hardly do. No interval knows of that drift: it tells noise between prompts only.
    """
    old, new = _by_key(before), _by_key(after)
    both = [key for key in new if key in old]
    return Changes(
        no_longer_identical=tuple(
            key for key in both if old[key].identical_to_target and _is_wrong(new[key])
        ),
        methods=tuple(_change(key, _side(before, key), _side(after, key)) for key in both),
        only_before=tuple(key for key in old if key not in new),
        only_after=tuple(key for key in new if key not in old),
        differences=tuple(find_differences(before, after)),
    )


def _by_key(document: ComparisonDocument) -> dict[MethodKey, MethodFigures]:
    return {MethodKey(one.name, one.temperature): one for one in document.methods}


def _is_wrong(figures: MethodFigures) -> bool:
    return figures.identical_to_target is False  # None says that it was not asked


class _Side(NamedTuple):
    """A method and the baseline of its document at the same temperature, if there is one."""

    figures: MethodFigures
    baseline: MethodFigures | None

    @property
    def is_baseline(self) -> bool:
        return self.figures is self.baseline

    def prompts(self) -> set[str]:
        """Return what is drawn anew: the prompts of both."""
        methods = [self.figures] if self.baseline is None else [self.figures, self.baseline]
        return {sample.prompt for one in methods for sample in one.samples}


def _side(document: ComparisonDocument, key: MethodKey) -> _Side:
    methods = _by_key(document)
    return _Side(methods[key], methods.get(MethodKey(document.baseline, key.temperature)))


def _change(key: MethodKey, before: _Side, after: _Side) -> MethodChange:
    old, new = before.prompts(), after.prompts()
    is_paired = old == new
    first = _resampled(before, old, stream=0)
    second = _resampled(after, new, stream=0 if is_paired else 1)
    figures = [
        _figure_change(
            metric, before, after, divided(second[metric], first[metric]), min(len(old), len(new))
        )
        for metric in _metrics(before, after)
    ]
    return MethodChange(key, is_paired, tuple(figures))


def _metrics(before: _Side, after: _Side) -> tuple[Metric, ...]:
    is_known = before.baseline is not None and after.baseline is not None
    if not is_known or (before.is_baseline and after.is_baseline):
        return "tau", "tokens_per_second"
    return "tau", "speedup", "tokens_per_second"


def _figure_change(
    metric: Metric, before: _Side, after: _Side, resampled: Floats, num_prompts: int
) -> FigureChange:
    old, new = getattr(before.figures, metric), getattr(after.figures, metric)
    ratio = interval_of(new / old if old else nan, resampled)
    return FigureChange(metric, old, new, ratio, _verdict(metric, ratio, num_prompts))


def _resampled(side: _Side, prompts: Iterable[str], stream: int) -> dict[Metric, Floats]:
    """Return a method's figures in every resample of its prompts."""
    place_of = {prompt: place for place, prompt in enumerate(sorted(prompts))}
    resamples = draws(len(place_of), stream)
    speed = _speed(side.figures, place_of, resamples)
    figures: dict[Metric, Floats] = {
        "tau": _tau(side.figures, place_of, resamples),
        "tokens_per_second": speed,
    }
    if side.baseline is not None:
        figures["speedup"] = divided(speed, _speed(side.baseline, place_of, resamples))
    return figures


def _tau(figures: MethodFigures, place_of: dict[str, int], resamples: Floats) -> Floats:
    # The first token of every turn comes from prefill, not from a forward after it.
    decoded = ((one.prompt, float(one.decoded)) for one in figures.samples)
    forwards = ((one.prompt, float(one.target_forwards)) for one in figures.samples)
    return pooled_ratio(
        sums_by_unit(decoded, place_of), sums_by_unit(forwards, place_of), resamples
    )


def _speed(figures: MethodFigures, place_of: dict[str, int], resamples: Floats) -> Floats:
    tokens = ((one.prompt, float(one.tokens)) for one in figures.samples)
    seconds = ((one.prompt, one.seconds) for one in figures.samples)
    return pooled_ratio(sums_by_unit(tokens, place_of), sums_by_unit(seconds, place_of), resamples)


def _verdict(metric: Metric, ratio: Interval, num_prompts: int) -> Verdict:
    if isnan(ratio.value):
        return "undefined"
    if num_prompts < FEWEST_PROMPTS:
        return "too few prompts"
    if ratio.low > 1:
        return "higher" if metric == "tau" else "faster"
    if ratio.high < 1:
        return "lower" if metric == "tau" else "slower"
    return "within noise"
