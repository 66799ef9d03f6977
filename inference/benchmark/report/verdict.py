"""Classification of methods as faster, slower or not distinguishable, in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from markupsafe import Markup

from inference.benchmark.document import ComparisonDocument, MethodFigures, SampleRecord
from inference.benchmark.method_names import AUTOREGRESSIVE
from inference.benchmark.report.style import (
    Looks,
    enumeration,
    fixed,
    interval,
    percent,
    significant,
)
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

Standing = Literal["faster", "slower", "open", "too few prompts"]


def num_groups(samples: Iterable[SampleRecord]) -> int:
    """Return the number of groups of prompts decoded together; at batch size 1, one per prompt."""
    return len({sample.group for sample in samples})


def rounding_note(dtype: str) -> str:
    """Return why greedy answers can differ from the target's own, although decoding is lossless.

    Args:
        dtype: dtype of the target.
    """
    often = f" (often in {dtype})" if dtype in ("float16", "bfloat16") else ""
    return (
        "Answers that differ need not be wrong: when several tokens are computed together, logits "
        "are rounded differently, which can decide between tokens that are almost equally likely"
        f"{often}. `jakiro verify` checks that nothing else differs."
    )


def has_too_few(samples: Iterable[SampleRecord]) -> bool:
    """Return whether there are too few independent samples for an interval."""
    return num_groups(samples) < FEWEST_PROMPTS


def standing(method: MethodFigures) -> Standing:
    """Return the standing of a method against the baseline, from the interval of its speed-up."""
    if has_too_few(method.samples):
        return "too few prompts"
    if method.speedup_low > 1:
        return "faster"
    return "slower" if method.speedup_high < 1 else "open"


def step_cost(method: MethodFigures, methods: Sequence[MethodFigures]) -> float | None:
    """Return how many autoregressive steps a method's decoding step takes; None if unknown.

    Args:
        method: method whose steps are compared.
        methods: all methods at the same temperature.
    """
    alone = next((each for each in methods if each.kind == AUTOREGRESSIVE), None)
    if alone is None or not (alone.step_seconds and method.step_seconds):
        return None
    return method.step_seconds / alone.step_seconds


def relative_speed(method: MethodFigures, other: MethodFigures) -> Interval:
    """Return the ratio of two methods' speeds, with a bootstrap interval.

    Each resample contains the same prompts for both methods, so the difficulty of the prompts
    cancels.

    Args:
        method: numerator of the ratio.
        other: denominator of the ratio.
    """
    groups = sorted({str(sample.group) for each in (method, other) for sample in each.samples})
    index_of = {group: index for index, group in enumerate(groups)}
    all_once = np.ones((1, len(groups)))
    value, resampled = (
        divided(_speed(method, index_of, each), _speed(other, index_of, each))
        for each in (all_once, resample_counts(len(groups)))
    )
    return interval_of(float(value[0]), resampled)


def leader(rivals: Sequence[MethodFigures]) -> MethodFigures | None:
    """Return the fastest of the methods that are shown to be faster than the baseline, if any."""
    faster = [method for method in rivals if standing(method) == "faster"]
    return max(faster, key=lambda method: method.speedup, default=None)


def not_slower(leading: MethodFigures, rivals: Sequence[MethodFigures]) -> list[MethodFigures]:
    """Return the methods that are not shown to be slower than the leading method.

    Args:
        leading: method with the highest speed-up.
        rivals: all methods except the baseline.
    """
    return [
        method
        for method in rivals
        if method is not leading
        and (has_too_few(method.samples) or not relative_speed(leading, method).low > 1)
    ]


def fastest(rivals: Sequence[MethodFigures]) -> MethodFigures | None:
    """Return the method that is shown to be faster than all other methods, if there is one."""
    leading = leader(rivals)
    return None if leading is None or not_slower(leading, rivals) else leading


def _speed(figures: MethodFigures, index_of: dict[str, int], resamples: Floats) -> Floats:
    tokens = ((str(sample.group), float(sample.tokens)) for sample in figures.samples)
    seconds = ((str(sample.group), sample.seconds) for sample in figures.samples)
    return pooled_ratio(sums_by_unit(tokens, index_of), sums_by_unit(seconds, index_of), resamples)


Methods = Sequence[MethodFigures]
Names = Mapping[str, Markup]

_TITLES: dict[Standing, str] = {
    "faster": "Faster",
    "slower": "Slower",
    "open": "Not distinguishable",
}


def verdict(document: ComparisonDocument, temperature: float, looks: Looks) -> Markup:
    """Return the findings at a temperature: speed-ups, the reasons for them, and exactness.

    Every method is named; a difference within the noise is reported as not distinguishable.

    Args:
        document: document of the comparison.
        temperature: sampling temperature; 0 is greedy.
        looks: labels of the methods.
    """
    names = {name: Markup("<code>{}</code>").format(look.label) for name, look in looks.items()}
    methods = [method for method in document.methods if method.temperature == temperature]
    rivals = [method for method in methods if method.name != document.baseline]
    if rivals:
        sentences = list(_described_speed(rivals, names[document.baseline], names))
    else:
        speed = significant(methods[0].tokens_per_second)
        sentences = [Markup("Only {}: {} tokens/s.").format(names[methods[0].name], speed)]
    sentences += _described_steps(methods, names)
    dtype = None if temperature else document.environment.target.dtype
    return Markup(" ").join([*sentences, _exactness(methods, names, dtype)])


def _described_speed(rivals: Methods, baseline: Markup, names: Names) -> Iterator[Markup]:
    ranked = sorted(rivals, key=lambda method: -method.speedup)
    few = [method for method in ranked if standing(method) == "too few prompts"]
    if few != ranked:
        yield Markup("Speed-ups are relative to {}, with 95% intervals.").format(baseline)
    if few:
        speeds = [
            Markup("{} {}").format(names[method.name], fixed(method.speedup)) for method in few
        ]
        sentence = Markup("Speed-ups over {}, without intervals: {}.")
        yield sentence.format(baseline, enumeration(speeds))
    for kind, title in _TITLES.items():
        if found := [method for method in ranked if standing(method) == kind]:
            yield Markup("{}: {}.").format(
                title, enumeration([_ratio(method, names) for method in found])
            )
    if len(rivals) > 1 and (leading := leader(rivals)) is not None:
        yield _lead(leading, ranked, names)


def _lead(leading: MethodFigures, ranked: Methods, names: Names) -> Markup:
    """Return a sentence that says whether the leading method is the fastest of all methods."""
    if rivals := not_slower(leading, ranked):
        sentence = Markup("{} is not shown to be faster than {}.")
        listed = enumeration([names[method.name] for method in rivals])
        return sentence.format(names[leading.name], listed)
    second = next(method for method in ranked if method is not leading)
    ahead = relative_speed(leading, second)
    sentence = Markup("{} is the fastest: {} {} times the speed of {}.")
    limits = interval(ahead.low, ahead.high)
    return sentence.format(names[leading.name], fixed(ahead.value), limits, names[second.name])


def _described_steps(methods: Methods, names: Names) -> Iterator[Markup]:
    """Yield a sentence on the duration of drafting methods' steps, if it is known."""
    costs = {
        method.name: (cost, method.tau)
        for method in sorted(methods, key=lambda method: -method.speedup)
        if method.conditional_acceptance_rate and (cost := step_cost(method, methods)) is not None
    }
    steps = [
        Markup("{} of {} takes {} times as long{} and emits {} tokens").format(
            "one" if index else "A decoding step",
            names[name],
            fixed(cost),
            "" if index else " as one of autoregressive decoding,",
            fixed(tau),
        )
        for index, (name, (cost, tau)) in enumerate(costs.items())
    ]
    if steps:
        yield Markup("{}.").format(Markup("; ").join(steps))


def _ratio(method: MethodFigures, names: Names) -> Markup:
    limits = interval(method.speedup_low, method.speedup_high)
    return Markup("{} <b>{}</b> {}").format(names[method.name], fixed(method.speedup), limits)


def _exactness(methods: Methods, names: Names, dtype: str | None) -> Markup:
    """Say which greedy answers are the target's own; `dtype` is None if tokens were sampled."""
    if dtype is None:
        return Markup("Sampled tokens are not compared with the target's.")
    compared = [method for method in methods if method.identical_to_target is not None]
    if not compared:
        return Markup("No tokens were compared with the target's.")
    differing = [method for method in compared if not method.identical_to_target]
    if differing:
        shares = [
            Markup("{} {}").format(names[method.name], percent(method.identical_share))
            for method in differing
        ]
        sentence = Markup("Share of samples identical to the target's own greedy tokens: {}. {}")
        return sentence.format(enumeration(shares), rounding_note(dtype))
    named = enumeration([names[method.name] for method in compared])
    listed = Markup("all methods") if compared == methods else named
    return Markup("Identical to the target's own greedy tokens: {}.").format(listed)
