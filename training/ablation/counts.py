"""What the documents of all seeds say about one arm at one temperature, in arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from inference.comparison.bootstrap import Floats, sums_by_unit
from inference.comparison.document import ComparisonDocument, MethodFigures, SampleRecord
from jakiro.errors import DataError
from training.ablation.uncertainty import Rate


@dataclass(frozen=True)
class Counts:
    """One method at one temperature, over all seeds and prompts.

    Attributes:
        tau: tokens after the first ones, per target forward after prefill.
        speed: tokens per second, reading the prompt included.
        acceptance_by_depth: means over seeds.
        seconds_per_draft: of the drafter's work for one target forward.
    """

    tau: Rate
    speed: Rate
    acceptance_by_depth: tuple[float, ...]
    seconds_per_draft: float


def prompts_in(documents: Mapping[int, ComparisonDocument]) -> dict[str, int]:
    """Return the places of all prompts.

    Raises:
        DataError: the documents are of different prompts.
    """
    sets = [_prompts(one.methods[0]) for one in documents.values()]
    if any(names != sets[0] for names in sets):
        raise _differing_prompts()
    return {prompt: place for place, prompt in enumerate(sorted(sets[0]))}


def counts_of(
    documents: Mapping[int, ComparisonDocument],
    name: str,
    temperature: float,
    place_of: Mapping[str, int],
) -> Counts:
    """Return what all documents say of a method; several samples of a prompt are added up.

    Args:
        documents: by seed.
        name: of the method.
        temperature: at which it decoded.
        place_of: the places of all prompts.

    Raises:
        DataError: it was not measured, or on other prompts.
    """
    figures = [_figures(document, name, temperature) for document in documents.values()]
    if any(_prompts(one) != place_of.keys() for one in figures):
        raise _differing_prompts()

    def summed(field: str) -> Floats:
        samples = [[(one.prompt, _value(one, field)) for one in each.samples] for each in figures]
        return np.stack([sums_by_unit(parts, place_of) for parts in samples])

    return Counts(
        tau=Rate(summed("decoded"), summed("target_forwards")),
        speed=Rate(summed("tokens"), summed("seconds")),
        acceptance_by_depth=_means([one.acceptance_by_depth for one in figures]),
        seconds_per_draft=_seconds_per_draft(figures),
    )


def _figures(document: ComparisonDocument, name: str, temperature: float) -> MethodFigures:
    try:
        return document.figures(name, temperature)
    except KeyError as error:
        raise DataError(
            f"{name} was not measured at temperature {temperature:g} with every seed",
            expected="one document for each seed, with all arms at all temperatures",
            got=", ".join(f"{one.name} at {one.temperature:g}" for one in document.methods),
            remedy="measure again",
        ) from error


def _prompts(figures: MethodFigures) -> set[str]:
    return {sample.prompt for sample in figures.samples}


def _value(sample: SampleRecord, field: str) -> float:
    return float(getattr(sample, field))


def _means(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the mean of each depth over the seeds that came so far."""
    depths = range(max(map(len, rows)))
    return tuple(fmean(row[depth] for row in rows if len(row) > depth) for depth in depths)


def _seconds_per_draft(figures: Sequence[MethodFigures]) -> float:
    forwards = sum(one.target_forwards for one in figures)
    return sum(one.seconds.draft for one in figures) / max(forwards, 1)


def _differing_prompts() -> DataError:
    return DataError(
        "arms or seeds were measured on different prompts",
        expected="the same prompts for all, so that they can be compared prompt by prompt",
        got="other ones",
        remedy="measure again, with the same prompt file and number of prompts",
    )
