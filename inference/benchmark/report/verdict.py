"""Summary of a comparison in short sentences: speed-ups, and whether the tokens are the same."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from markupsafe import Markup

from inference.benchmark.document import ComparisonDocument, MethodFigures, SampleRecord
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
    draws,
    interval_of,
    pooled_ratio,
    sums_by_unit,
)

Standing = Literal["faster", "slower", "open", "too few prompts"]


def num_groups(samples: Iterable[SampleRecord]) -> int:
    """Return how many groups were decoded together: one by one, how many prompts."""
    return len({one.group for one in samples})


def has_too_few(samples: Iterable[SampleRecord]) -> bool:
    """Return whether there are too few independent samples for an interval."""
    return num_groups(samples) < FEWEST_PROMPTS


def standing(one: MethodFigures) -> Standing:
    """Return where the interval of a method's speed-up lies: above 1, below 1, or around 1."""
    if has_too_few(one.samples):
        return "too few prompts"
    if one.speedup_low > 1:
        return "faster"
    return "slower" if one.speedup_high < 1 else "open"


def relative_speed(one: MethodFigures, other: MethodFigures) -> Interval:
    """Return the ratio of two methods' speeds with an interval over shared resamples.

    Both methods decoded the same prompts, so that their difficulty cancels.
    """
    groups = sorted({str(sample.group) for each in (one, other) for sample in each.samples})
    place_of = {group: place for place, group in enumerate(groups)}
    all_once = np.ones((1, len(groups)))
    value, resampled = (
        divided(_speed(one, place_of, each), _speed(other, place_of, each))
        for each in (all_once, draws(len(groups)))
    )
    return interval_of(float(value[0]), resampled)


def leader(rivals: Sequence[MethodFigures]) -> MethodFigures | None:
    """Return the fastest of the methods that are shown to be faster than the baseline."""
    faster = [one for one in rivals if standing(one) == "faster"]
    return max(faster, key=lambda one: one.speedup, default=None)


def unsettled(leading: MethodFigures, rivals: Sequence[MethodFigures]) -> list[MethodFigures]:
    """Return the methods that the leading one is not shown to be faster than."""
    return [
        one
        for one in rivals
        if one is not leading
        and (has_too_few(one.samples) or not relative_speed(leading, one).low > 1)
    ]


def fastest(rivals: Sequence[MethodFigures]) -> MethodFigures | None:
    """Return the method that is shown to be faster than the baseline and than all others."""
    leading = leader(rivals)
    return None if leading is None or unsettled(leading, rivals) else leading


def _speed(figures: MethodFigures, place_of: dict[str, int], resamples: Floats) -> Floats:
    tokens = ((str(one.group), float(one.tokens)) for one in figures.samples)
    seconds = ((str(one.group), one.seconds) for one in figures.samples)
    return pooled_ratio(sums_by_unit(tokens, place_of), sums_by_unit(seconds, place_of), resamples)


Methods = Sequence[MethodFigures]
Names = Mapping[str, Markup]

_TITLES: dict[Standing, str] = {
    "faster": "Faster",
    "slower": "Slower",
    "open": "Cannot be told apart",
}


def verdict(document: ComparisonDocument, temperature: float, looks: Looks) -> Markup:
    """Return what was found at a temperature: speed-ups with intervals, and exactness.

    Every method is named, and no difference is called one that may be noise between prompts.
    """
    names = {name: Markup("<code>{}</code>").format(look.label) for name, look in looks.items()}
    methods = [one for one in document.methods if one.temperature == temperature]
    rivals = [one for one in methods if one.name != document.baseline]
    if rivals:
        said = list(_described_speed(rivals, names[document.baseline], names))
    else:
        speed = significant(methods[0].tokens_per_second)
        said = [Markup("Only {}: {} tokens/s.").format(names[methods[0].name], speed)]
    return Markup(" ").join([*said, _exactness(methods, names, is_greedy=temperature == 0)])


def _described_speed(rivals: Methods, baseline: Markup, names: Names) -> Iterator[Markup]:
    yield Markup("Speed-up over {} with 95% intervals.").format(baseline)
    ranked = sorted(rivals, key=lambda one: -one.speedup)
    if few := [one for one in ranked if standing(one) == "too few prompts"]:
        speeds = [Markup("{} {}").format(names[one.name], fixed(one.speedup)) for one in few]
        said = Markup("Too few prompts to compare ({} independent, at least {} needed): {}.")
        yield said.format(num_groups(few[0].samples), FEWEST_PROMPTS, enumeration(speeds))
    for kind, title in _TITLES.items():
        if found := [one for one in ranked if standing(one) == kind]:
            yield Markup("{}: {}.").format(
                title, enumeration([_ratio(one, names) for one in found])
            )
    if len(rivals) > 1 and (leading := leader(rivals)) is not None:
        yield _lead(leading, ranked, names)


def _lead(leading: MethodFigures, ranked: Methods, names: Names) -> Markup:
    """Return whether the leading method is the fastest of all, on the same prompts."""
    if doubtful := unsettled(leading, ranked):
        said = Markup("{} is not shown to be faster than {}.")
        return said.format(names[leading.name], enumeration([names[one.name] for one in doubtful]))
    second = next(one for one in ranked if one is not leading)
    ahead = relative_speed(leading, second)
    said = Markup("{} is the fastest: {} {} times the speed of {}.")
    limits = interval(ahead.low, ahead.high)
    return said.format(names[leading.name], fixed(ahead.value), limits, names[second.name])


def _ratio(one: MethodFigures, names: Names) -> Markup:
    limits = interval(one.speedup_low, one.speedup_high)
    return Markup("{} <b>{}</b> {}").format(names[one.name], fixed(one.speedup), limits)


def _exactness(methods: Methods, names: Names, *, is_greedy: bool) -> Markup:
    if not is_greedy:
        return Markup("Sampled tokens are not compared with the target's.")
    compared = [one for one in methods if one.identical_to_target is not None]
    if not compared:
        return Markup("No tokens were compared with the target's.")
    differing = [one for one in compared if not one.identical_to_target]
    if differing:
        shares = [
            Markup("{} {}").format(names[one.name], percent(one.identical_share))
            for one in differing
        ]
        said = Markup("Share of samples with the target's own greedy tokens: {}.")
        return said.format(enumeration(shares))
    which = [names[one.name] for one in compared]
    who = Markup("all methods") if compared == methods else enumeration(which)
    return Markup("The target's own greedy tokens: {}.").format(who)
