"""What the figures of a comparison say, in plain sentences."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from inference.comparison.document import ComparisonDocument, MethodFigures
from inference.comparison.palette import Looks
from inference.comparison.wording import fixed, percent, significant

Methods = Sequence[MethodFigures]
Names = Mapping[str, Markup]

_MANY = 3  # more names than this are only counted


def verdict(document: ComparisonDocument, temperature: float, looks: Looks) -> Markup:
    """Return what was found at a temperature: who is fastest, how surely, and if exactly."""
    names = {name: Markup("<code>{}</code>").format(look.label) for name, look in looks.items()}
    methods = [one for one in document.methods if one.temperature == temperature]
    rivals = [one for one in methods if one.name != document.baseline]
    speed = _speed(rivals, document.baseline, names) if rivals else _alone(methods[0], names)
    return Markup(" ").join([*speed, _exactness(methods, names, is_greedy=temperature == 0)])


def _alone(one: MethodFigures, names: Names) -> list[Markup]:
    said = Markup("Only {} was measured, at {} tokens/s; there is nothing to compare it with.")
    return [said.format(names[one.name], significant(one.tokens_per_second))]


def _speed(rivals: Methods, baseline: str, names: Names) -> list[Markup]:
    best = max(rivals, key=lambda one: one.speedup)
    near = [one for one in rivals if one is not best and one.speedup_high >= best.speedup_low]
    said = _finding(best, lead="leads" if near else "is the fastest").format(
        best=names[best.name],
        baseline=names[baseline],
        speedup=Markup("<b>{}</b>").format(fixed(best.speedup)),
        interval=f"95% interval {fixed(best.speedup_low)} to {fixed(best.speedup_high)}",
    )
    return [said, _ties(near, names)] if near and best.speedup_low > 1 else [said]


def _finding(best: MethodFigures, lead: str) -> Markup:
    if best.speedup_low > 1:
        return Markup("{best} " + lead + ": {speedup} times the speed of {baseline} ({interval}).")
    if best.speedup_high < 1:
        return Markup(
            "No method was faster than {baseline}; the nearest, {best}, ran at {speedup} times its"
            " speed ({interval})."
        )
    return Markup(
        "Nothing is resolved: {best} ran at {speedup} times the speed of {baseline}, but the"
        " interval includes 1 ({interval})."
    )


def _ties(near: Methods, names: Names) -> Markup:
    if len(near) == 1:
        said = Markup("Its lead over {} is not settled: their intervals overlap.")
        return said.format(names[near[0].name])
    *others, last = (names[one.name] for one in near)
    which = Markup(" and ").join([Markup(", ").join(others), last])
    if len(near) > _MANY:
        which = Markup("{} other methods").format(len(near))
    return Markup("Its lead over {} is not settled: intervals overlap.").format(which)


def _exactness(methods: Methods, names: Names, *, is_greedy: bool) -> Markup:
    if not is_greedy:
        return Markup("Tokens are drawn here, so they are not compared one by one.")
    compared = [one for one in methods if one.identical_to_target is not None]
    differing = [one for one in compared if not one.identical_to_target]
    if not compared:
        return Markup("No tokens were compared with those of the target.")
    if not differing:
        which = Markup("Every method" if len(methods) > 1 else "It")
        return which + Markup(" gave exactly the tokens of the target's own greedy decoding.")
    worst = min(differing, key=lambda one: one.identical_share or 0.0)
    share = percent(1 - (worst.identical_share or 0.0))
    others = f", {len(differing) - 1} more in fewer" if len(differing) > 1 else ""
    said = "Not all tokens are those of the target: {} differed in {} of its samples{}."
    return Markup(said).format(names[worst.name], share, others)
