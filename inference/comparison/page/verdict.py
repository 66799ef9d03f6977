"""What the figures of a comparison say, in plain sentences that are true."""

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


def verdict(document: ComparisonDocument, temperature: float, looks: Looks) -> Markup:
    """Return what was found at a temperature: who is faster, how surely, and if exactly.

    Every method is named, and no difference is called one that may be noise between prompts.
    """
    names = {name: Markup("<code>{}</code>").format(look.label) for name, look in looks.items()}
    methods = [one for one in document.methods if one.temperature == temperature]
    rivals = [one for one in methods if one.name != document.baseline]
    speed = _speed(rivals, names[document.baseline], names) if rivals else _alone(methods[0], names)
    return Markup(" ").join([*speed, _exactness(methods, names, is_greedy=temperature == 0)])


def _alone(one: MethodFigures, names: Names) -> Iterator[Markup]:
    said = Markup("Only {} was measured, at {} tokens/s; there is nothing to compare it with.")
    yield said.format(names[one.name], significant(one.tokens_per_second))


def _speed(rivals: Methods, baseline: Markup, names: Names) -> Iterator[Markup]:
    by_standing: dict[Standing, list[MethodFigures]] = {}
    for one in sorted(rivals, key=lambda one: -one.speedup):
        by_standing.setdefault(standing(one), []).append(one)
    if few := by_standing.pop("too few prompts", []):
        yield _too_few(few, baseline, names)
    if not by_standing:
        return
    leading = leader(rivals)
    if leading is None:
        yield Markup("No method is shown to be faster than {}.").format(baseline)
    else:
        yield from _lead(leading, rivals, baseline, names)
    if others := [one for one in by_standing.get("faster", []) if one is not leading]:
        yield Markup("Also faster than {}: {}.").format(baseline, _listed(others, names))
    if slower := by_standing.get("slower", []):
        yield Markup("Slower than {}: {}.").format(baseline, _listed(slower, names))
    if still := by_standing.get("open", []):
        said = Markup("Open, since the interval includes 1: {}.")
        yield said.format(_listed(still, names))


def _lead(
    leading: MethodFigures, rivals: Methods, baseline: Markup, names: Names
) -> Iterator[Markup]:
    """Say how fast the leading method is, and whether it is the fastest of all."""
    doubtful = unsettled(leading, rivals)
    others = [one for one in rivals if one is not leading]
    said = Markup("{} is {}: <b>{}</b> times the speed of {} (95% interval {} to {}){}.")
    yield said.format(
        names[leading.name],
        "the fastest" if others and not doubtful else "faster",
        fixed(leading.speedup),
        baseline,
        fixed(leading.speedup_low),
        fixed(leading.speedup_high),
        _ahead(leading, others, names) if others and not doubtful else "",
    )
    if doubtful:
        said = Markup("It is not settled whether it is faster than {}.")
        yield said.format(enumeration([names[one.name] for one in doubtful]))


def _ahead(leading: MethodFigures, others: Methods, names: Names) -> Markup:
    """Say how far a method is ahead of the next one, on the same prompts."""
    runner_up = max(others, key=lambda one: one.speedup)
    ahead = relative_speed(leading, runner_up)
    said = Markup(", and {} times that of {} {}")
    return said.format(fixed(ahead.value), names[runner_up.name], interval(ahead.low, ahead.high))


def _listed(methods: Methods, names: Names) -> Markup:
    said = Markup("{} {} {}")
    return enumeration(
        [
            said.format(
                names[one.name], fixed(one.speedup), interval(one.speedup_low, one.speedup_high)
            )
            for one in methods
        ]
    )


def _too_few(methods: Methods, baseline: Markup, names: Names) -> Markup:
    """Give the figures of methods with too few prompts, and say what they are not worth."""
    said = Markup(
        "Too few prompts to say anything about noise, or about who is faster: {}, where at least {}"
        " are needed. Measured, in times the speed of {}: {}."
    )
    speeds = [Markup("{} {}").format(names[one.name], fixed(one.speedup)) for one in methods]
    return said.format(_measured(methods[0]), FEWEST_PROMPTS, baseline, enumeration(speeds))


def _measured(one: MethodFigures) -> str:
    groups, prompts = num_groups(one.samples), len({sample.prompt for sample in one.samples})
    if groups < prompts:
        return f"{groups} group{'' if groups == 1 else 's'} of prompts decoded together"
    return f"{prompts} prompt{'' if prompts == 1 else 's'}"


def _exactness(methods: Methods, names: Names, *, is_greedy: bool) -> Markup:
    if not is_greedy:
        return Markup("Tokens are drawn here, so they are not compared one by one.")
    compared = [one for one in methods if one.identical_to_target is not None]
    differing = [one for one in compared if not one.identical_to_target]
    if not compared:
        return Markup("No tokens were compared with those of the target.")
    if differing:
        said = Markup(
            "Not all tokens are those of the target's own greedy decoding; samples that are"
            " identical: {}."
        )
        return said.format(enumeration([_share(one, names) for one in differing]))
    which = enumeration([names[one.name] for one in compared])
    if len(compared) == len(methods):
        which = Markup("Every method" if len(methods) > 1 else "It")
    return which + Markup(" gave exactly the tokens of the target's own greedy decoding.")


def _share(one: MethodFigures, names: Names) -> Markup:
    return Markup("{} of those of {}").format(percent(one.identical_share), names[one.name])
