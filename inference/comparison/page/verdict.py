"""Summary of a comparison in short sentences: speed-ups, and whether the tokens are the same."""

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from inference.comparison.bootstrap import FEWEST_PROMPTS
from inference.comparison.document import ComparisonDocument, MethodFigures
from inference.comparison.page.palette import Looks
from inference.comparison.page.wording import enumeration, fixed, interval, percent, significant
from inference.comparison.standing import (
    Standing,
    leader,
    num_groups,
    relative_speed,
    standing,
    unsettled,
)

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
        said = list(_speed(rivals, names[document.baseline], names))
    else:
        speed = significant(methods[0].tokens_per_second)
        said = [Markup("Only {}: {} tokens/s.").format(names[methods[0].name], speed)]
    return Markup(" ").join([*said, _exactness(methods, names, is_greedy=temperature == 0)])


def _speed(rivals: Methods, baseline: Markup, names: Names) -> Iterator[Markup]:
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
