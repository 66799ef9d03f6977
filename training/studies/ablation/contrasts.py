"""What the documents of all seeds say about one arm at one temperature, in arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from inference.benchmark.document import ComparisonDocument, MethodFigures, SampleRecord
from inference.benchmark.stats import Floats, sums_by_unit
from jakiro.errors import DataError
from training.config import TrainSettings
from training.studies.ablation.arms import BASE
from training.studies.ablation.results import TwoByTwo
from training.studies.ablation.uncertainty import Rate, Ratio, product


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


# What tells the cells apart, makes them equally large, or only names a run.
_APART: Any = {
    "drafter": {"experts": {"num_experts", "intermediate_size"}},
    "objective": {"contrast_weight"},
    "seed": True,
    "run_folder": True,
}


class Cells(NamedTuple):
    """The names of the four arms."""

    both: str
    only_experts: str
    only_contrast: str
    neither: str


def find_cells(arms: Mapping[str, TrainSettings]) -> Cells | None:
    """Return the arms of the 2 x 2 around the base, or None if not all four are there.

    Args:
        arms: settings by name; the base has experts and contrastive loss.
    """
    base = arms[BASE]
    if not (_has_experts(base) and _has_contrast(base)):
        return None
    found = {
        (_has_experts(one), _has_contrast(one)): name
        for name, one in arms.items()
        if _is_cell(one, base)
    }
    if len(found) < 4:
        return None
    return Cells(found[True, True], found[True, False], found[False, True], found[False, False])


def two_by_two(
    cells: Cells, temperature: float, rates: Mapping[str, Rate], trees: str | None = None
) -> TwoByTwo:
    """Return both effects and their interaction as ratios of tau.

    Args:
        cells: the four arms.
        temperature: that they were measured at.
        rates: tau of every arm.
        trees: that they were measured with, where there are several kinds.

    Raises:
        DataError: as for `training.studies.ablation.uncertainty.product`.
    """
    both, only_experts, only_contrast, neither = (rates[name] for name in cells)

    def effect(*exponents: float) -> Ratio:
        in_order = (both, only_experts, only_contrast, neither)
        return product(list(zip(exponents, in_order, strict=True)))

    experts = effect(0.5, 0.5, -0.5, -0.5)
    contrast = effect(0.5, -0.5, 0.5, -0.5)
    interaction = effect(1.0, -1.0, -1.0, 1.0)
    return TwoByTwo(
        temperature=temperature,
        trees=trees,
        **cells._asdict(),
        experts=experts,
        contrast=contrast,
        interaction=interaction,
        sentence=_sentence(_where(temperature, trees), experts, contrast, interaction),
    )


def _is_cell(settings: TrainSettings, base: TrainSettings) -> bool:
    """Whether experts and contrast are as the base has them or off, and all else is the same."""
    return (
        settings.drafter.experts.num_experts in (1, base.drafter.experts.num_experts)
        and settings.objective.contrast_weight in (0.0, base.objective.contrast_weight)
        and settings.model_dump(exclude=_APART) == base.model_dump(exclude=_APART)
    )


def _has_experts(settings: TrainSettings) -> bool:
    return settings.drafter.experts.num_experts > 1


def _has_contrast(settings: TrainSettings) -> bool:
    return settings.objective.contrast_weight > 0


def _where(temperature: float, trees: str | None) -> str:
    return f"At T = {temperature:g}" + ("" if trees is None else f" with trees {trees}")


def _sentence(where: str, experts: Ratio, contrast: Ratio, interaction: Ratio) -> str:
    parts = {"experts": experts, "contrastive loss": contrast, "interaction": interaction}
    told = ", ".join(f"{name} {_in_words(one)}" for name, one in parts.items())
    return f"{where}: {told}."


def _in_words(effect: Ratio) -> str:
    told = f"x{effect.value:.3f} [{effect.low:.3f}, {effect.high:.3f}]"
    return told if effect.is_resolved else f"{told} (not resolved)"
