"""From the documents of all seeds to what a study found; nothing is measured here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.method_names import PLAIN
from training.config import TrainSettings
from training.studies.ablation.arms import BASE
from training.studies.ablation.contrasts import (
    Counts,
    counts_of,
    find_cells,
    prompts_in,
    two_by_two,
)
from training.studies.ablation.results import ArmExperts, ArmRow, StudyResults, TwoByTwo, Verdict
from training.studies.ablation.trees import Trees, any_by_costs
from training.studies.ablation.uncertainty import Ratio, ratio


@dataclass(frozen=True)
class ArmFacts:
    """What is known of an arm without decoding with it.

    Attributes:
        name: of the arm, and of the method in the documents.
        settings: that it was trained with.
        parameters: trainable ones.
        training_tokens: read in training, with each seed.
        held_out_agreement: with the target, with each seed that measured it.
        experts: their diversity (`training.evaluation.diversity`), with each seed that measured it.
    """

    name: str
    settings: TrainSettings
    parameters: int
    training_tokens: tuple[int, ...] = ()
    held_out_agreement: tuple[float, ...] = ()
    experts: tuple[Mapping[str, Any], ...] = ()

    @property
    def diversity(self) -> ArmExperts | None:
        """What is told of the experts; None if it was not measured."""
        if not self.experts:
            return None
        names = ("top_overlap", "router_entropy", "load_entropy")
        by_seed = [[one[name] for name in names] for one in self.experts]
        overlaps, router, load = zip(*by_seed, strict=True)
        return ArmExperts(
            arm=self.name,
            top_overlap=None if None in overlaps else fmean(overlaps),
            router_entropy=fmean(router),
            load_entropy=fmean(load),
            by_seed=tuple((overlap, one, other) for overlap, one, other in by_seed),
        )


@dataclass(frozen=True)
class _Measured:
    """All methods at one temperature with one kind of trees."""

    temperature: float
    trees: str | None
    plain: Counts
    arms: Mapping[str, Counts]

    def row(self, facts: ArmFacts) -> ArmRow:
        """Return what is told of an arm."""
        arm, base = self.arms[facts.name], self.arms[BASE]
        tau_ratio = ratio(arm.tau, base.tau)
        agreement = facts.held_out_agreement
        return ArmRow(
            arm=facts.name,
            temperature=self.temperature,
            trees=self.trees,
            parameters=facts.parameters,
            intermediate_size=facts.settings.drafter.experts.intermediate_size,
            training_tokens=facts.training_tokens,
            held_out_agreement=fmean(agreement) if agreement else None,
            tau=arm.tau.pooled,
            tau_ratio=tau_ratio,
            acceptance_by_depth=arm.acceptance_by_depth,
            tokens_per_second=arm.speed.pooled,
            seconds_per_draft=arm.seconds_per_draft,
            speed_ratio=ratio(arm.speed, base.speed),
            speedup=ratio(arm.speed, self.plain.speed),
            verdict=_verdict(facts.name, tau_ratio),
        )


def analyse(
    documents: Mapping[int, ComparisonDocument],
    arms: Sequence[ArmFacts],
    trees: Sequence[Trees] = (Trees(options=""),),
) -> StudyResults:
    """Return what a study found.

    Args:
        documents: by seed, the comparison of all arms that were trained with it, and of plain
            decoding.
        arms: one of them the base.
        trees: every arm was measured with all of these; methods are named after both.

    Raises:
        DataError: something was not measured, or on other prompts, or on too few of them.
    """
    place_of = prompts_in(documents)

    def counts(method: str, temperature: float) -> Counts:
        return counts_of(documents, method, temperature, place_of)

    measured = [
        _Measured(
            temperature,
            kind.label,
            counts(PLAIN, temperature),
            {arm.name: counts(kind.method(arm.name), temperature) for arm in arms},
        )
        for temperature in _temperatures(documents)
        for kind in trees
    ]
    rows = tuple(one.row(arm) for one in measured for arm in arms)
    return StudyResults(
        seeds=len(documents),
        prompts=len(place_of),
        note=_note(len(documents), sum(row.verdict != "base" for row in rows), trees),
        rows=rows,
        interactions=_interactions(measured, arms),
        experts=tuple(one for arm in arms if (one := arm.diversity) is not None),
    )


def _temperatures(documents: Mapping[int, ComparisonDocument]) -> list[float]:
    methods = (one for document in documents.values() for one in document.methods)
    return list(dict.fromkeys(one.temperature for one in methods))


def _interactions(measured: Sequence[_Measured], arms: Sequence[ArmFacts]) -> tuple[TwoByTwo, ...]:
    cells = find_cells({arm.name: arm.settings for arm in arms})
    if cells is None:
        return ()
    return tuple(
        two_by_two(
            cells,
            one.temperature,
            {name: arm.tau for name, arm in one.arms.items()},
            one.trees,
        )
        for one in measured
    )


def _verdict(arm: str, tau_ratio: Ratio) -> Verdict:
    if arm == BASE:
        return "base"
    if not tau_ratio.is_resolved:
        return "not resolved"
    return "better" if tau_ratio.value > 1 else "worse"


def _note(num_seeds: int, num_intervals: int, trees: Sequence[Trees]) -> str:
    by_costs = ""
    if any_by_costs(trees):
        by_costs = " Trees by costs differ from arm to arm: compare their tokens/s, not their tau."
    if num_seeds < 2:
        return (
            "One seed: the 95% intervals tell how prompts differ, not how trainings do; "
            f"another seed may reverse any verdict.{by_costs}"
        )
    share = "one in ten" if num_seeds == 2 else "one in twenty"  # two points tell little of spread
    return (
        f"95% intervals over {num_seeds} seeds and all prompts, paired. Verdicts are about tau; "
        f"of {num_intervals}, about {share} errs even where nothing differs.{by_costs}"
    )
