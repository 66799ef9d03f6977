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
from training.studies.ablation.contrasts import Counts, counts_of, find_cells, two_by_two
from training.studies.ablation.results import ArmExperts, ArmRow, ArmVerdict, StudyResults


@dataclass(frozen=True)
class ArmFacts:
    """Properties of an arm that are known from its training.

    Attributes:
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
    def diversity(self) -> ArmExperts:
        """The diversity of the experts, if it was measured."""
        names = ("top_overlap", "router_entropy", "load_entropy")
        by_seed = [[seed[name] for name in names] for seed in self.experts]
        overlaps, router, load = zip(*by_seed, strict=True)
        return ArmExperts(
            arm=self.name,
            top_overlap=None if None in overlaps else fmean(overlaps),
            router_entropy=fmean(router),
            load_entropy=fmean(load),
            by_seed=tuple((overlap, entropy, mean) for overlap, entropy, mean in by_seed),
        )

    def row(self, temperature: float, counts: Mapping[str, Counts]) -> ArmRow:
        """Return the results of the arm at a temperature, from the counts of all methods."""
        arm, base = counts[self.name], counts[BASE]
        tau_ratio = ratio(arm.tau, base.tau)
        agreement = self.validation_agreement
        return ArmRow(
            arm=self.name,
            temperature=temperature,
            parameters=self.parameters,
            intermediate_size=self.settings.drafter.experts.intermediate_size,
            training_tokens=self.training_tokens,
            validation_agreement=fmean(agreement) if agreement else None,
            tau=arm.tau.pooled,
            tau_ratio=tau_ratio,
            conditional_acceptance_rate=arm.conditional_acceptance_rate,
            tokens_per_second=arm.speed.pooled,
            seconds_per_draft=arm.seconds_per_draft,
            speed_ratio=ratio(arm.speed, base.speed),
            speedup=ratio(arm.speed, counts[AUTOREGRESSIVE].speed),
            verdict=_verdict(self.name, tau_ratio),
        )


def analyse(documents: Mapping[int, ComparisonDocument], arms: Sequence[ArmFacts]) -> StudyResults:
    """Return the results of a study."""
    methods = next(iter(documents.values())).methods
    prompts = sorted({sample.prompt for sample in methods[0].samples})
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    cells = find_cells({arm.name: arm.settings for arm in arms})
    rows, interactions = [], []
    for temperature in dict.fromkeys(method.temperature for method in methods):
        counts = {
            name: counts_of(documents.values(), name, temperature, index_of)
            for name in (AUTOREGRESSIVE, *(arm.name for arm in arms))
        }
        rows += [arm.row(temperature, counts) for arm in arms]
        if cells is not None:
            rates = {name: count.tau for name, count in counts.items()}
            interactions.append(two_by_two(cells, temperature, rates))
    return StudyResults(
        seeds=len(documents),
        prompts=len(prompts),
        note=_note(len(documents), sum(row.verdict != "base" for row in rows)),
        rows=tuple(rows),
        interactions=tuple(interactions),
        experts=tuple(arm.diversity for arm in arms if arm.experts),
    )


def _verdict(arm: str, tau_ratio: Ratio) -> ArmVerdict:
    if arm == BASE:
        return "base"
    if not tau_ratio.is_resolved:
        return "not resolved"
    return "better" if tau_ratio.value > 1 else "worse"


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
