"""Analysis of a study: results from the `jakiro bench` documents of all seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.method_names import AUTOREGRESSIVE
from inference.benchmark.stats import Ratio, ratio
from training.config import TrainSettings
from training.studies.ablation.arms import BASE
from training.studies.ablation.contrasts import (
    Counts,
    counts_of,
    find_cells,
    prompts_in,
    two_by_two,
)
from training.studies.ablation.results import ArmExperts, ArmRow, ArmVerdict, StudyResults, TwoByTwo
from training.studies.ablation.trees import Trees


@dataclass(frozen=True)
class ArmFacts:
    """Properties of an arm that are known from its training.

    Attributes:
        name: name of the arm, which is also the name of its method in the documents.
        settings: settings of the training.
        parameters: number of trainable parameters.
        training_tokens: number of tokens read in training, for each seed.
        validation_agreement: agreement with the target on validation data, for each seed for which
            it was measured.
        experts: diversity of the experts (`training.evaluation.diversity`), for each seed for which
            it was measured.
    """

    name: str
    settings: TrainSettings
    parameters: int
    training_tokens: tuple[int, ...] = ()
    validation_agreement: tuple[float, ...] = ()
    experts: tuple[Mapping[str, Any], ...] = ()

    @property
    def diversity(self) -> ArmExperts | None:
        """The diversity of the experts; None if it was not measured."""
        if not self.experts:
            return None
        names = ("top_overlap", "router_entropy", "load_entropy")
        by_seed = [[found[name] for name in names] for found in self.experts]
        overlaps, router, load = zip(*by_seed, strict=True)
        return ArmExperts(
            arm=self.name,
            top_overlap=None if None in overlaps else fmean(overlaps),
            router_entropy=fmean(router),
            load_entropy=fmean(load),
            by_seed=tuple((overlap, own, mean) for overlap, own, mean in by_seed),
        )


@dataclass(frozen=True)
class _Measured:
    """The counts of all methods at one temperature with one kind of trees."""

    temperature: float
    trees: str | None
    autoregressive: Counts
    arms: Mapping[str, Counts]

    def row(self, facts: ArmFacts) -> ArmRow:
        """Return the results of an arm."""
        arm, base = self.arms[facts.name], self.arms[BASE]
        tau_ratio = ratio(arm.tau, base.tau)
        agreement = facts.validation_agreement
        return ArmRow(
            arm=facts.name,
            temperature=self.temperature,
            trees=self.trees,
            parameters=facts.parameters,
            intermediate_size=facts.settings.drafter.experts.intermediate_size,
            training_tokens=facts.training_tokens,
            validation_agreement=fmean(agreement) if agreement else None,
            tau=arm.tau.pooled,
            tau_ratio=tau_ratio,
            conditional_acceptance_rate=arm.conditional_acceptance_rate,
            tokens_per_second=arm.speed.pooled,
            seconds_per_draft=arm.seconds_per_draft,
            speed_ratio=ratio(arm.speed, base.speed),
            speedup=ratio(arm.speed, self.autoregressive.speed),
            verdict=_verdict(facts.name, tau_ratio),
        )


def analyse(
    documents: Mapping[int, ComparisonDocument],
    arms: Sequence[ArmFacts],
    trees: Sequence[Trees] = (Trees(options=""),),
    *,
    is_interleaved: bool = True,
) -> StudyResults:
    """Return the results of a study.

    Args:
        documents: comparisons of all arms and autoregressive decoding, by seed.
        arms: properties of the arms, including the base.
        trees: kinds of trees; every arm was measured with each kind.
        is_interleaved: whether the arms were measured at the same time.

    Raises:
        DataError: a method was not measured, or the methods were measured on different prompts or
            on too few prompts.
    """
    index_of = prompts_in(documents)

    def counts(method: str, temperature: float) -> Counts:
        return counts_of(documents, method, temperature, index_of)

    measured = [
        _Measured(
            temperature,
            kind.label,
            counts(AUTOREGRESSIVE, temperature),
            {arm.name: counts(kind.method(arm.name), temperature) for arm in arms},
        )
        for temperature in _temperatures(documents)
        for kind in trees
    ]
    rows = tuple(group.row(arm) for group in measured for arm in arms)
    note = _note(len(documents), sum(row.verdict != "base" for row in rows))
    return StudyResults(
        seeds=len(documents),
        prompts=len(index_of),
        note=note if is_interleaved else f"{note} {_NOT_INTERLEAVED}",
        rows=rows,
        interactions=_interactions(measured, arms),
        experts=tuple(found for arm in arms if (found := arm.diversity) is not None),
    )


def _temperatures(documents: Mapping[int, ComparisonDocument]) -> list[float]:
    methods = (method for document in documents.values() for method in document.methods)
    return list(dict.fromkeys(method.temperature for method in methods))


def _interactions(measured: Sequence[_Measured], arms: Sequence[ArmFacts]) -> tuple[TwoByTwo, ...]:
    cells = find_cells({arm.name: arm.settings for arm in arms})
    if cells is None:
        return ()
    return tuple(
        two_by_two(
            cells,
            group.temperature,
            {name: arm.tau for name, arm in group.arms.items()},
            group.trees,
        )
        for group in measured
    )


def _verdict(arm: str, tau_ratio: Ratio) -> ArmVerdict:
    if arm == BASE:
        return "base"
    if not tau_ratio.is_resolved:
        return "not resolved"
    return "better" if tau_ratio.value > 1 else "worse"


_NOT_INTERLEAVED = (
    "The arms were measured at different times, which the intervals of speeds do not cover: do not "
    "compare speeds."
)


def _note(num_seeds: int, num_intervals: int) -> str:
    if num_seeds < 2:
        return (
            "With one seed, the 95% intervals cover the spread over prompts, not over trainings; "
            "another seed may reverse any verdict."
        )
    # With two seeds, the spread over seeds is estimated poorly.
    rate = "one in ten" if num_seeds == 2 else "one in twenty"
    return (
        f"The 95% intervals over {num_seeds} seeds and all prompts are paired. Of the "
        f"{num_intervals} verdicts on tau, about {rate} would be 'better' or 'worse' by chance if "
        f"no arm differed from the base."
    )
