"""Computation of tau, speed and other values of a method, with bootstrap intervals.

Intervals are computed over groups of prompts that are decoded together. At batch size 1, each group
is a single prompt.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inference.benchmark.document import (
    CategoryFigures,
    ExpertFigures,
    MethodFigures,
    Quantiles,
    SampleRecord,
    Seconds,
)
from inference.benchmark.method_names import WITHOUT_OWN_DRAFTS
from inference.benchmark.methods import Method, setting
from inference.benchmark.samples import Measured, Sample
from inference.benchmark.stats import (
    Floats,
    Interval,
    interval_of,
    pooled_ratio,
    resample_counts,
    sums_by_unit,
)
from inference.engine.stats import DecodeStats

# Hash of a prompt -> greedy tokens of the target itself, for each chat turn.
Reference = Mapping[str, list[list[int]]]


def figures_of(
    method: Method,
    measured: Measured,
    baseline: Measured,
    reference: Reference | None,
    notes: Sequence[str] = (),
) -> MethodFigures:
    """Return the figures of a method at a temperature.

    Args:
        reference: greedy tokens of the target itself; None if tokens are sampled.
    """
    samples = measured.samples
    stats = DecodeStats.pooled(sample.stats for sample in samples)
    tau, speedup = _tau(samples), _speedup(samples, baseline.samples)
    return MethodFigures(
        name=method.family,
        kind=method.kind,
        temperature=measured.temperature,
        tau=tau.value,
        tau_low=tau.low,
        tau_high=tau.high,
        tokens=stats.emitted,
        target_forwards=stats.target_forwards,
        drafting_share=None if method.kind in WITHOUT_OWN_DRAFTS else stats.drafting_share,
        tokens_per_second=measured.tokens_per_second,
        decoding_tokens_per_second=_decoding_speed(samples, measured.seconds),
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        **_exactness(samples, reference),
        conditional_acceptance_rate=tuple(stats.conditional_acceptance_rate),
        acceptance_rate_per_position=tuple(stats.acceptance_rate_per_position),
        experts=_experts(stats),
        seconds=_seconds(measured),
        time_to_first_token=_quantiles([sample.seconds_to_first_token for sample in samples]),
        inter_token=_quantiles(_gaps(samples)),
        peak_memory_bytes=measured.peak_memory,
        tree=method.tree(measured.temperature),
        parameters=method.parameters,
        notes=tuple(note for note in (setting(method), *notes) if note),
        categories=_categories(samples, baseline.samples),
        samples=tuple(_record(sample) for sample in samples),
    )


def _tau(samples: Sequence[Sample]) -> Interval:
    resampled = _pooled(
        samples, lambda sample: sample.stats.decoded, lambda sample: sample.stats.target_forwards
    )
    return interval_of(DecodeStats.pooled(sample.stats for sample in samples).tau, resampled)


def _speedup(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Interval:
    """Return a method's tokens per second, divided by those of the baseline, with the interval."""
    own, other = (
        _pooled(several, lambda sample: sample.stats.emitted, lambda sample: sample.seconds)
        for several in (samples, baseline)
    )
    return interval_of(_speed(samples) / _speed(baseline), own / other)


def _pooled(
    samples: Sequence[Sample], top: Callable[[Sample], float], bottom: Callable[[Sample], float]
) -> Floats:
    """Return sum(top) / sum(bottom) in every resample of the groups."""
    groups = sorted({sample.group for sample in samples})
    index_of = {str(group): index for index, group in enumerate(groups)}
    above, below = (
        sums_by_unit([(str(sample.group), float(value(sample))) for sample in samples], index_of)
        for value in (top, bottom)
    )
    return pooled_ratio(above, below, resample_counts(len(groups)))


def _speed(samples: Sequence[Sample]) -> float:
    tokens = sum(sample.stats.emitted for sample in samples)
    return tokens / sum(sample.seconds for sample in samples)


def _decoding_speed(samples: Sequence[Sample], seconds: float) -> float:
    """Return the tokens per second, without the first tokens of each chat turn and their time."""
    # Seconds until all prompts of a group had their first token, for each chat turn.
    first: dict[object, float] = {}
    for sample in samples:
        for number, turn in enumerate(sample.turns):
            key = sample.repeat, sample.group, number
            first[key] = max(first.get(key, 0.0), turn.arrivals[0].seconds)
    decoding = seconds - sum(first.values())
    tokens = sum(sample.stats.decoded for sample in samples)
    return tokens / decoding if decoding > 0 else 0.0


def _exactness(samples: Sequence[Sample], reference: Reference | None) -> dict[str, Any]:
    if reference is None:
        return {"identical_to_target": None, "identical_share": None}
    same = [sample.token_ids == reference[sample.prompt.fingerprint] for sample in samples]
    return {"identical_to_target": all(same), "identical_share": sum(same) / len(same)}


def _experts(stats: DecodeStats) -> tuple[ExpertFigures, ...]:
    """Return the figures of each expert; none if all candidates have the same proposer."""
    proposed, accepted = stats.proposed_by_proposer, stats.accepted_by_proposer
    if len(proposed) < 2:
        return ()
    return tuple(
        ExpertFigures(expert=expert, proposed=proposed[expert], accepted=accepted[expert])
        for expert in sorted(proposed)
    )


def _seconds(measured: Measured) -> Seconds:
    parts = measured.parts
    return Seconds(**parts, other=max(0.0, measured.seconds - sum(parts.values())))


def _gaps(samples: Sequence[Sample]) -> list[float]:
    return [gap for sample in samples for turn in sample.turns for gap in turn.gaps]


def _quantiles(values: Sequence[float]) -> Quantiles:
    return Quantiles.of(values) if values else Quantiles(p50=0.0, p95=0.0)


def _categories(
    samples: Sequence[Sample], baseline: Sequence[Sample]
) -> dict[str, CategoryFigures]:
    sizes = Counter(sample.prompt.category for sample in samples)
    if len(sizes) < 2:
        return {}
    return {name: _category(_of(samples, name), _of(baseline, name)) for name in sorted(sizes)}


def _of(samples: Sequence[Sample], category: str) -> list[Sample]:
    return [sample for sample in samples if sample.prompt.category == category]


def _category(samples: Sequence[Sample], baseline: Sequence[Sample]) -> CategoryFigures:
    speedup = _speedup(samples, baseline)
    return CategoryFigures(
        prompts=len({sample.prompt.fingerprint for sample in samples}),
        tau=_tau(samples).value,
        tokens_per_second=_speed(samples),
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
    )


def _record(sample: Sample) -> SampleRecord:
    stats = sample.stats
    return SampleRecord(
        prompt=sample.prompt.fingerprint,
        category=sample.prompt.category,
        repeat=sample.repeat,
        group=sample.group,
        turns=len(sample.turns),
        decoded=stats.decoded,
        tokens=stats.emitted,
        target_forwards=stats.target_forwards,
        seconds=sample.seconds,
        seconds_to_first_token=sample.seconds_to_first_token,
    )
