"""One side of a change: what a method did in one document, and which of it is compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from inference.comparison.bootstrap import (
    FEWEST_PROMPTS,
    Floats,
    divided,
    draws,
    pooled_ratio,
    sums_by_unit,
)
from inference.comparison.document import ComparisonDocument, MethodFigures, SampleRecord

Metric = Literal["tau", "speedup", "tokens_per_second"]
Units = Mapping[str, str]  # of every prompt that is compared: the unit that it is drawn with

# Paired: "all" prompts, or those that are "shared"; else "other groups" of them, "other prompts".
PairingKind = Literal["all", "shared", "other groups", "other prompts"]


@dataclass(frozen=True)
class Side:
    """A method, and the baseline of its document at the same temperature, if there is one."""

    figures: MethodFigures
    baseline: MethodFigures | None

    @property
    def is_baseline(self) -> bool:
        """Whether speed-ups are over this method."""
        return self.figures is self.baseline

    def prompts(self) -> Units:
        """Return every prompt as a unit of its own."""
        return {sample.prompt: sample.prompt for sample in self._samples()}

    def groups(self) -> Units:
        """Return every prompt with the content of the group that it was decoded in."""
        members: dict[int, set[str]] = {}
        for sample in self._samples():
            members.setdefault(sample.group, set()).add(sample.prompt)
        return {
            prompt: " ".join(sorted(together))
            for together in members.values()
            for prompt in together
        }

    def resampled(self, units: Units, stream: int) -> dict[Metric, Floats]:
        """Return its figures of those prompts alone: first all, then every resample of units.

        Args:
            units: prompts that are left out count for nothing.
            stream: of the draws; the same one for both sides if they are paired.
        """
        place_of = {unit: place for place, unit in enumerate(sorted(set(units.values())))}
        resamples = np.vstack([np.ones((1, len(place_of))), draws(len(place_of), stream)])
        speed = _speed(_counted(self.figures, units), place_of, resamples)
        figures: dict[Metric, Floats] = {
            "tau": _tau(_counted(self.figures, units), place_of, resamples),
            "tokens_per_second": speed,
        }
        if self.baseline is not None:
            baseline = _speed(_counted(self.baseline, units), place_of, resamples)
            figures["speedup"] = divided(speed, baseline)
        return figures

    def _samples(self) -> Iterable[SampleRecord]:
        for one in (self.figures, self.baseline):
            yield from () if one is None else one.samples


def side_of(document: ComparisonDocument, name: str, temperature: float) -> Side:
    """Return a method of a document at a temperature.

    Raises:
        KeyError: it was not measured.
    """
    try:
        baseline = document.figures(document.baseline, temperature)
    except KeyError:
        baseline = None
    return Side(document.figures(name, temperature), baseline)


class Pairing(NamedTuple):
    """What of two sides is compared, and in which units it is drawn."""

    kind: PairingKind
    before: Units
    after: Units
    num_shared: int  # prompts that both sides have

    @property
    def is_paired(self) -> bool:
        """Whether both sides are drawn together, so that what makes a prompt easy cancels."""
        return self.kind in ("all", "shared")

    @property
    def num_units(self) -> int:
        """Units of the side that has fewer."""
        return min(len(set(units.values())) for units in (self.before, self.after))


def pair(before: Side, after: Side, *, is_batched: bool) -> Pairing:
    """Return how two sides are compared: on the same prompts, if there are enough of them.

    Args:
        before: the first side.
        after: the second one.
        is_batched: prompts of a group share one measured time, at least on one side; so groups are
            drawn, and they are paired only if all of them hold the same prompts on both sides.
    """
    old, new = before.prompts(), after.prompts()
    shared = {prompt: prompt for prompt in old if prompt in new}
    num_shared = len(shared)
    if is_batched:
        other: PairingKind = "other groups" if old == new else "other prompts"
        old, new = before.groups(), after.groups()
        return Pairing("all" if old == new else other, old, new, num_shared)
    if old == new:
        return Pairing("all", old, new, num_shared)
    if num_shared >= FEWEST_PROMPTS:
        return Pairing("shared", shared, shared, num_shared)
    return Pairing("other prompts", old, new, num_shared)


def _counted(figures: MethodFigures, units: Units) -> list[tuple[str, SampleRecord]]:
    """Return the samples that are compared, each with its unit."""
    return [(units[one.prompt], one) for one in figures.samples if one.prompt in units]


def _tau(
    samples: list[tuple[str, SampleRecord]], place_of: dict[str, int], resamples: Floats
) -> Floats:
    # The first token of every turn comes from prefill, not from a forward after it.
    decoded = ((unit, float(one.decoded)) for unit, one in samples)
    forwards = ((unit, float(one.target_forwards)) for unit, one in samples)
    return pooled_ratio(
        sums_by_unit(decoded, place_of), sums_by_unit(forwards, place_of), resamples
    )


def _speed(
    samples: list[tuple[str, SampleRecord]], place_of: dict[str, int], resamples: Floats
) -> Floats:
    tokens = ((unit, float(one.tokens)) for unit, one in samples)
    seconds = ((unit, one.seconds) for unit, one in samples)
    return pooled_ratio(sums_by_unit(tokens, place_of), sums_by_unit(seconds, place_of), resamples)
