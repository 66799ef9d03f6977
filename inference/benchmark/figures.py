"""From samples to figures with intervals.

Intervals are over groups of prompts that share their seconds: one by one, over prompts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from inference.benchmark.document import (
    CategoryFigures,
    ExpertFigures,
    MethodFigures,
    Quantiles,
    SampleRecord,
    Seconds,
)
from inference.benchmark.methods import Method
from inference.benchmark.samples import Measured, Sample
from inference.benchmark.stats import (
    Floats,
    Interval,
    draws,
    interval_of,
    pooled_ratio,
    sums_by_unit,
)
from inference.engine.stats import DecodeStats


def repeated_ngram_share(texts: Iterable[Sequence[int]], *, size: int = 4) -> float:
    """Return the share, 0 to 1, of runs of tokens that occurred before in the same text.

    Args:
        texts: token ids of each text; those of its prompt do not belong to it.
        size: tokens in a run. Texts that hold no run do not count.
    """
    num_runs = num_repeated = 0
    for text in texts:
        runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        num_runs += len(runs)
        num_repeated += len(runs) - len(set(runs))
    return num_repeated / num_runs if num_runs else 0.0


# Greedy tokens of the target itself, for every prompt and turn.
Reference = Mapping[str, list[list[int]]]


def figures_of(
    method: Method,
    measured: Measured,
    baseline: Measured,
    reference: Reference | None,
    notes: Sequence[str] = (),
) -> MethodFigures:
    """Return the figures of one method at one temperature.

    Args:
        method: what was measured.
        measured: its samples.
        baseline: the samples that its speed is compared with.
        reference: what the target itself says; None where tokens are drawn.
        notes: what a reader should know.
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
        tau_macro=_tau_macro(samples),
        tokens=stats.emitted,
        target_forwards=stats.target_forwards,
        tokens_per_second=measured.tokens_per_second,
        decoding_tokens_per_second=_decoding_speed(samples, measured.seconds),
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        **_identity(samples, reference),
        acceptance_by_depth=tuple(stats.conditional_acceptance_rate),
        marginal_acceptance_by_depth=tuple(stats.acceptance_rate_per_position),
        experts=_experts(stats),
        seconds=_seconds(measured),
        time_to_first_token=_quantiles([one.seconds_to_first_token for one in samples]),
        inter_token=_quantiles(_gaps(samples)),
        peak_memory_bytes=measured.peak_memory,
        repeated_4gram_share=repeated_ngram_share(_texts(samples)),
        tree=method.tree(measured.temperature),
        parameters=method.parameters,
        notes=tuple(note for note in (method.note, *notes) if note),
        categories=_categories(samples, baseline.samples),
        samples=tuple(map(_record, samples)),
    )


def _tau(samples: Sequence[Sample]) -> Interval:
    resampled = _pooled(
        samples, lambda one: one.stats.decoded, lambda one: one.stats.target_forwards
    )
    return interval_of(DecodeStats.pooled(one.stats for one in samples).tau, resampled)


def _tau_macro(samples: Sequence[Sample]) -> float:
    """Return the mean over prompts of each prompt's tau."""
    by_prompt: dict[str, list[DecodeStats]] = {}
    for one in samples:
        by_prompt.setdefault(one.prompt.identity, []).append(one.stats)
    return float(np.mean([DecodeStats.pooled(several).tau for several in by_prompt.values()]))


def _speedup(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Interval:
    """Return the ratio of tokens per second, with its interval over groups that both decoded."""
    own, other = (
        _pooled(several, lambda one: one.stats.emitted, lambda one: one.seconds)
        for several in (samples, baseline)
    )
    return interval_of(_speed(samples) / _speed(baseline), own / other)


def _pooled(
    samples: Sequence[Sample], top: Callable[[Sample], float], bottom: Callable[[Sample], float]
) -> Floats:
    """Return sum(top) / sum(bottom) in every resample of the groups."""
    groups = sorted({one.group for one in samples})
    place_of = {str(group): place for place, group in enumerate(groups)}
    above, below = (
        sums_by_unit([(str(one.group), float(value(one))) for one in samples], place_of)
        for value in (top, bottom)
    )
    return pooled_ratio(above, below, draws(len(groups)))


def _speed(samples: Sequence[Sample]) -> float:
    return sum(one.stats.emitted for one in samples) / sum(one.seconds for one in samples)


def _decoding_speed(samples: Sequence[Sample], seconds: float) -> float:
    """Return tokens after the first delivery of each turn over the seconds after it."""
    first: dict[object, float] = {}  # of a group's turn: when all had their first token
    for one in samples:
        for number, turn in enumerate(one.turns):
            key = one.repeat, one.group, number
            first[key] = max(first.get(key, 0.0), turn.arrivals[0].seconds)
    decoding = seconds - sum(first.values())
    return sum(one.stats.decoded for one in samples) / decoding if decoding > 0 else 0.0


def _identity(samples: Sequence[Sample], reference: Reference | None) -> dict[str, Any]:
    if reference is None:
        return {"identical_to_target": None, "identical_share": None}
    same = [one.token_ids == reference[one.prompt.identity] for one in samples]
    return {"identical_to_target": all(same), "identical_share": sum(same) / len(same)}


def _experts(stats: DecodeStats) -> tuple[ExpertFigures, ...]:
    proposed, accepted = stats.proposed_by_proposer, stats.accepted_by_proposer
    return tuple(
        ExpertFigures(expert=expert, proposed=proposed[expert], accepted=accepted[expert])
        for expert in sorted(proposed)
    )


def _seconds(measured: Measured) -> Seconds:
    parts = measured.parts
    return Seconds(**parts, other=max(0.0, measured.seconds - sum(parts.values())))


def _gaps(samples: Sequence[Sample]) -> list[float]:
    return [gap for one in samples for turn in one.turns for gap in turn.gaps]


def _quantiles(values: Sequence[float]) -> Quantiles:
    if not values:
        return Quantiles(p50=0.0, p95=0.0)
    p50, p95 = np.quantile(values, (0.5, 0.95))
    return Quantiles(p50=float(p50), p95=float(p95))


def _texts(samples: Sequence[Sample]) -> list[list[int]]:
    return list(chain.from_iterable(one.token_ids for one in samples))


def _categories(
    samples: Sequence[Sample], baseline: Sequence[Sample]
) -> dict[str, CategoryFigures]:
    sizes = Counter(one.prompt.category for one in samples)
    if len(sizes) < 2:
        return {}
    return {name: _category(_of(samples, name), _of(baseline, name)) for name in sorted(sizes)}


def _of(samples: Sequence[Sample], category: str) -> list[Sample]:
    return [one for one in samples if one.prompt.category == category]


def _category(samples: Sequence[Sample], baseline: Sequence[Sample]) -> CategoryFigures:
    speedup = _speedup(samples, baseline)
    return CategoryFigures(
        prompts=len({one.prompt.identity for one in samples}),
        tau=_tau(samples).value,
        tokens_per_second=_speed(samples),
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
    )


def _record(one: Sample) -> SampleRecord:
    stats = one.stats
    return SampleRecord(
        prompt=one.prompt.identity,
        category=one.prompt.category,
        repeat=one.repeat,
        group=one.group,
        turns=len(one.turns),
        decoded=stats.decoded,
        tokens=stats.emitted,
        target_forwards=stats.target_forwards,
        seconds=one.seconds,
        seconds_to_first_token=one.seconds_to_first_token,
    )
