"""Computation of tau, speed and other values of a method, with 95% intervals.

Intervals are computed over groups of prompts that are decoded together. At batch size 1, each group
is a single prompt.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from inference.benchmark.document import (
    CategoryFigures,
    ExpertFigures,
    MethodFigures,
    Quantiles,
    Seconds,
)
from inference.benchmark.method_names import WITHOUT_OWN_DRAFTS
from inference.benchmark.methods import Method, setting
from inference.benchmark.samples import SPEED, TAU, Measured, Sample, rate_of
from inference.benchmark.stats import Ratio, product, ratio
from inference.engine.stats import DecodeStats


def figures_of(
    method: Method,
    temperature: float,
    measured: Measured,
    baseline: Measured,
    reference: Mapping[str, list[list[int]]] | None,
    notes: Sequence[str] = (),
) -> MethodFigures:
    """Return the figures of a method at a temperature.

    Args:
        reference: greedy tokens of the target itself, for the hash of each prompt and each chat
            turn; None if tokens are sampled.
    """
    samples, parts = measured.samples, measured.parts
    stats = DecodeStats.pooled(answer.stats for sample in samples for answer in sample.answers)
    same = []
    if reference is not None:
        same = [sample.token_ids == reference[sample.prompt] for sample in samples]
    tau = _tau(samples)
    return MethodFigures(
        name=method.family,
        kind=method.kind,
        temperature=temperature,
        tau_low=tau.low,
        tau_high=tau.high,
        **_main_figures(samples, baseline.samples),
        tokens=stats.emitted,
        target_forwards=stats.target_forwards,
        drafting_share=None if method.kind in WITHOUT_OWN_DRAFTS else stats.drafting_share,
        decoding_tokens_per_second=_decoding_speed(measured),
        identical_to_target=all(same) if same else None,
        identical_share=sum(same) / len(same) if same else None,
        conditional_acceptance_rate=tuple(stats.conditional_acceptance_rate),
        acceptance_rate_per_position=tuple(stats.acceptance_rate_per_position),
        experts=_experts(stats),
        seconds=Seconds(**parts, other=max(0.0, measured.seconds - parts.total())),
        time_to_first_token=Quantiles.of([sample.seconds_to_first_token for sample in samples]),
        inter_token=Quantiles.of(
            [gap for sample in samples for answer in sample.answers for gap in answer.gaps]
        ),
        peak_memory_bytes=measured.peak_memory,
        tree=method.tree(temperature),
        parameters=method.parameters,
        notes=tuple(note for note in (setting(method), *notes) if note),
        categories=_categories(samples, baseline.samples),
        samples=tuple(sample.model_copy(update={"answers": ()}) for sample in samples),
    )


def _main_figures(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any]:
    groups = sorted({sample.group for sample in samples})
    speed, other = (rate_of([each], SPEED, groups, "group") for each in (samples, baseline))
    speedup = ratio(speed, other)
    return {
        "tau": _tau(samples).value,
        "tokens_per_second": speed.pooled,
        "speedup": speedup.value,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
    }


def _tau(samples: Sequence[Sample]) -> Ratio:
    rate = rate_of([samples], TAU, sorted({sample.group for sample in samples}), "group")
    if not rate.top.sum() or not rate.bottom.sum():  # prefill has delivered all tokens
        return Ratio(value=1.0, low=1.0, high=1.0, by_seed=(1.0,))
    return product([(1.0, rate)])


def _decoding_speed(measured: Measured) -> float:
    """Return the tokens per second, without the first tokens of each chat turn and their time."""
    # Seconds until all prompts of a group had their first token, for each chat turn.
    first: dict[object, float] = {}
    for sample in measured.samples:
        for number, answer in enumerate(sample.answers):
            key = sample.repeat, sample.group, number
            first[key] = max(first.get(key, 0.0), answer.arrivals[0].seconds)
    decoding = measured.seconds - sum(first.values())
    tokens = sum(sample.decoded for sample in measured.samples)
    return tokens / decoding if decoding > 0 else 0.0


def _experts(stats: DecodeStats) -> tuple[ExpertFigures, ...]:
    """Return the figures of each expert; none if all candidates have the same proposer."""
    proposed, accepted = stats.proposed_by_proposer, stats.accepted_by_proposer
    if len(proposed) < 2:
        return ()
    return tuple(
        ExpertFigures(expert=expert, proposed=proposed[expert], accepted=accepted[expert])
        for expert in sorted(proposed)
    )


def _categories(
    samples: Sequence[Sample], baseline: Sequence[Sample]
) -> dict[str, CategoryFigures]:
    sizes = Counter(
        sample.category for sample in {sample.prompt: sample for sample in samples}.values()
    )
    if len(sizes) < 2:
        return {}
    return {
        name: CategoryFigures(
            prompts=size,
            **_main_figures(
                *([one for one in each if one.category == name] for each in (samples, baseline))
            ),
        )
        for name, size in sorted(sizes.items())
    }
