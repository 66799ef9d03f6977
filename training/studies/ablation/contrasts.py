"""Counts over all seeds and prompts, and the 2 x 2 comparison of experts and contrastive loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from inference.benchmark.document import ComparisonDocument, MethodFigures, SampleRecord
from inference.benchmark.stats import Floats, Rate, Ratio, product, sums_by_unit
from jakiro.errors import DataError
from training.config import TrainSettings
from training.studies.ablation.arms import BASE
from training.studies.ablation.results import TwoByTwo


@dataclass(frozen=True)
class Counts:
    """Counts of one method at one temperature, over all seeds and prompts.

    Attributes:
        tau: tokens after the first token, per forward pass of the target after prefill.
        speed: tokens per second, including prefill.
        conditional_acceptance_rate: rate at each depth, averaged over seeds.
        seconds_per_draft: seconds of drafting per forward pass of the target.
    """

    tau: Rate
    speed: Rate
    conditional_acceptance_rate: tuple[float, ...]
    seconds_per_draft: float


def prompts_in(documents: Mapping[int, ComparisonDocument]) -> dict[str, int]:
    """Return an index for every prompt.

    Raises:
        DataError: the documents have different prompts.
    """
    sets = [_prompts(document.methods[0]) for document in documents.values()]
    if any(names != sets[0] for names in sets):
        raise _differing_prompts()
    return {prompt: index for index, prompt in enumerate(sorted(sets[0]))}


def counts_of(
    documents: Mapping[int, ComparisonDocument],
    name: str,
    temperature: float,
    index_of: Mapping[str, int],
) -> Counts:
    """Return the counts of a method in all documents, summed over the samples of each prompt.

    Args:
        documents: documents by seed.
        name: name of the method.
        temperature: sampling temperature of the method.
        index_of: index of every prompt, as returned by `prompts_in`.

    Raises:
        DataError: the method was not measured, or was measured on different prompts.
    """
    figures = [_figures(document, name, temperature) for document in documents.values()]
    if any(_prompts(each) != index_of.keys() for each in figures):
        raise _differing_prompts()

    def summed(field: str) -> Floats:
        samples = [
            [(sample.prompt, _value(sample, field)) for sample in each.samples] for each in figures
        ]
        return np.stack([sums_by_unit(parts, index_of) for parts in samples])

    return Counts(
        tau=Rate(summed("decoded"), summed("target_forwards")),
        speed=Rate(summed("tokens"), summed("seconds")),
        conditional_acceptance_rate=mean_rates(
            [each.conditional_acceptance_rate for each in figures]
        ),
        seconds_per_draft=_seconds_per_draft(figures),
    )


def mean_rates(rates: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the mean rate at each depth, over the seeds that reached this depth.

    Args:
        rates: rates of each seed by depth, not all of which reach the same depth.
    """
    depths = range(max(map(len, rates)))
    return tuple(fmean(own[depth] for own in rates if len(own) > depth) for depth in depths)


def _figures(document: ComparisonDocument, name: str, temperature: float) -> MethodFigures:
    try:
        return document.figures(name, temperature)
    except KeyError as error:
        raise DataError(
            f"{name} was not measured at temperature {temperature:g} with every seed",
            expected="one document for each seed, with all arms at all temperatures",
            got=", ".join(f"{each.name} at {each.temperature:g}" for each in document.methods),
            remedy="measure again",
        ) from error


def _prompts(figures: MethodFigures) -> set[str]:
    return {sample.prompt for sample in figures.samples}


def _value(sample: SampleRecord, field: str) -> float:
    return float(getattr(sample, field))


def _seconds_per_draft(figures: Sequence[MethodFigures]) -> float:
    forwards = sum(each.target_forwards for each in figures)
    return sum(each.seconds.draft for each in figures) / max(forwards, 1)


def _differing_prompts() -> DataError:
    return DataError(
        "arms or seeds were measured on different prompts",
        expected="the same prompts for all, so that they can be compared prompt by prompt",
        got="different prompts",
        remedy="measure again, with the same prompt file and number of prompts",
    )


# Settings in which the four arms may differ: these settings define the arms, make them equally
# large, or identify a run.
_DIFFERENT: Any = {
    "drafter": {"experts": {"num_experts", "active_experts", "intermediate_size"}},
    "objective": {"contrast_weight"},
    "seed": True,
    "run_folder": True,
}


class Cells(NamedTuple):
    """The names of the four arms of a 2 x 2 comparison."""

    both: str
    only_experts: str
    only_contrast: str
    neither: str


def find_cells(arms: Mapping[str, TrainSettings]) -> Cells | None:
    """Return the names of the four arms of a 2 x 2 comparison; None if an arm is missing.

    The base must be one of the four. If several arms have both experts and contrastive loss, the
    first one that is part of such a comparison counts.

    Args:
        arms: settings of the arms, including the base, by name.
    """
    for both in arms.values():
        if not (_has_experts(both) and _has_contrast(both)):
            continue
        found = {
            (_has_experts(settings), _has_contrast(settings)): name
            for name, settings in arms.items()
            if _is_cell(settings, both)
        }
        if len(found) == 4 and BASE in found.values():
            with_experts, without = ((found[on, True], found[on, False]) for on in (True, False))
            return Cells(*with_experts, *without)
    return None


def two_by_two(
    cells: Cells, temperature: float, rates: Mapping[str, Rate], trees: str | None = None
) -> TwoByTwo:
    """Return the effects of experts and contrastive loss, and the interaction, as ratios of tau.

    Args:
        cells: names of the four arms.
        temperature: sampling temperature of the measurement.
        rates: tau of every arm, by name.
        trees: label of the kind of trees; None for the default trees.

    Raises:
        DataError: there is only one prompt, or an arm decoded no tokens with one of the seeds.
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


def _is_cell(settings: TrainSettings, both: TrainSettings) -> bool:
    """Return whether an arm equals `both`, except that experts or contrastive loss may be off."""
    own, other = settings.drafter.experts, both.drafter.experts
    has_same_experts = (own.num_experts, own.active_experts) == (
        other.num_experts,
        other.active_experts,
    )
    return (
        (has_same_experts or own.num_experts == 1)
        and settings.objective.contrast_weight in (0.0, both.objective.contrast_weight)
        and settings.model_dump(exclude=_DIFFERENT) == both.model_dump(exclude=_DIFFERENT)
    )


def _has_experts(settings: TrainSettings) -> bool:
    return settings.drafter.experts.num_experts > 1


def _has_contrast(settings: TrainSettings) -> bool:
    return settings.objective.contrast_weight > 0


def _where(temperature: float, trees: str | None) -> str:
    return f"At T = {temperature:g}" + ("" if trees is None else f" with trees {trees}")


def _sentence(where: str, experts: Ratio, contrast: Ratio, interaction: Ratio) -> str:
    parts = {"experts": experts, "contrastive loss": contrast, "interaction": interaction}
    effects = ", ".join(f"{name} {_in_words(effect)}" for name, effect in parts.items())
    return f"{where}: {effects}."


def _in_words(effect: Ratio) -> str:
    text = f"x{effect.value:.3f} [{effect.low:.3f}, {effect.high:.3f}]"
    return text if effect.is_resolved else f"{text} (not resolved)"
