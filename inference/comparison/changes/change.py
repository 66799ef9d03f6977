"""What changed between two results of `jakiro bench`, and whether it is beyond noise."""

from dataclasses import dataclass
from math import isnan
from typing import Literal, NamedTuple, get_args

from inference.bench.intervals import Interval
from inference.comparison.bootstrap import FEWEST_PROMPTS, Floats, divided, interval_of
from inference.comparison.changes.differences import Difference, find_differences
from inference.comparison.changes.side import Metric, Pairing, Side, pair, side_of
from inference.comparison.document import ComparisonDocument, MethodFigures

Finding = Literal["higher", "lower", "faster", "slower", "within noise"]
Verdict = Literal[Finding, "drifts with the machine", "too few prompts", "undefined"]


class MethodKey(NamedTuple):
    """A method at a temperature."""

    name: str
    temperature: float


@dataclass(frozen=True)
class FigureChange:
    """One figure before and after, and their ratio, all of the prompts that are compared.

    Where the documents share only some of their prompts, these values are of the shared ones, so
    that neither they nor their ratio need be those of the documents' own figures.

    Attributes:
        metric: which figure of `MethodFigures`.
        before: its value in the first document; NaN if nothing can be divided by.
        after: its value in the second one; likewise.
        ratio: after / before with its 95% bootstrap interval over prompts, or over groups that are
            decoded together; NaN if before is zero.
        verdict: whether the interval excludes 1, and where it lies then; none for tokens per
            second, since those of different runs drift with the machine.
    """

    metric: Metric
    before: float
    after: float
    ratio: Interval
    verdict: Verdict

    @property
    def may_mislead(self) -> bool:
        """Whether its verdict could be chance: it is a finding, and its interval has a width."""
        return self.verdict in get_args(Finding) and self.ratio.low < self.ratio.high


@dataclass(frozen=True)
class MethodChange:
    """The figures of one method that both documents have.

    Attributes:
        key: the method and its temperature.
        pairing: which prompts are compared, and in which units they are drawn.
        figures: the baseline has no speed-up.
    """

    key: MethodKey
    pairing: Pairing
    figures: tuple[FigureChange, ...]

    @property
    def is_paired(self) -> bool:
        """Whether both sides have the same prompts, so that what makes a prompt easy cancels."""
        return self.pairing.is_paired


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
        """Intervals with a verdict that could have excluded 1 by chance."""
        return sum(figure.may_mislead for one in self.methods for figure in one.figures)


def compare_documents(before: ComparisonDocument, after: ComparisonDocument) -> Changes:
    """Return what changed from one document to another, on the prompts that both have.

    Tokens per second of different runs drift with the machine; speed-ups, which are ratios within a
    run, hardly do. No interval knows of that drift: it tells noise between prompts only.
    """
    old, new = _by_key(before), _by_key(after)
    both = [key for key in new if key in old]
    is_batched = max(before.settings.batch_size, after.settings.batch_size) > 1
    return Changes(
        no_longer_identical=tuple(
            key for key in both if old[key].identical_to_target and _is_wrong(new[key])
        ),
        methods=tuple(
            _change(key, side_of(before, *key), side_of(after, *key), is_batched=is_batched)
            for key in both
        ),
        only_before=tuple(key for key in old if key not in new),
        only_after=tuple(key for key in new if key not in old),
        differences=tuple(find_differences(before, after)),
    )


def _by_key(document: ComparisonDocument) -> dict[MethodKey, MethodFigures]:
    return {MethodKey(one.name, one.temperature): one for one in document.methods}


def _is_wrong(figures: MethodFigures) -> bool:
    return figures.identical_to_target is False  # None says that it was not asked


def _change(key: MethodKey, before: Side, after: Side, *, is_batched: bool) -> MethodChange:
    pairing = pair(before, after, is_batched=is_batched)
    first = before.resampled(pairing.before, stream=0)
    second = after.resampled(pairing.after, stream=0 if pairing.is_paired else 1)
    figures = [
        _figure_change(metric, first[metric], second[metric], pairing.num_units)
        for metric in _metrics(before, after)
    ]
    return MethodChange(key, pairing, tuple(figures))


def _metrics(before: Side, after: Side) -> tuple[Metric, ...]:
    is_known = before.baseline is not None and after.baseline is not None
    if not is_known or (before.is_baseline and after.is_baseline):
        return "tau", "tokens_per_second"
    return "tau", "speedup", "tokens_per_second"


def _figure_change(metric: Metric, before: Floats, after: Floats, num_units: int) -> FigureChange:
    """Compare a figure; its values come first, those of the resamples behind them."""
    ratios = divided(after, before)
    ratio = interval_of(float(ratios[0]), ratios[1:])
    verdict = _verdict(metric, ratio, num_units)
    return FigureChange(metric, float(before[0]), float(after[0]), ratio, verdict)


def _verdict(metric: Metric, ratio: Interval, num_units: int) -> Verdict:
    if isnan(ratio.value):
        return "undefined"
    if num_units < FEWEST_PROMPTS:
        return "too few prompts"
    if metric == "tokens_per_second":
        return "drifts with the machine"
    if ratio.low > 1:
        return "higher" if metric == "tau" else "faster"
    if ratio.high < 1:
        return "lower" if metric == "tau" else "slower"
    return "within noise"
