"""From the documents of all seeds to what a study found; nothing is measured here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from inference.comparison.document import ComparisonDocument
from inference.comparison.method_names import PLAIN
from training.ablation.arms import BASE
from training.ablation.counts import Counts, counts_of, prompts_in
from training.ablation.interaction import find_cells, two_by_two
from training.ablation.results import ArmRow, StudyResults, TwoByTwo, Verdict
from training.ablation.uncertainty import Ratio, ratio
from training.config import TrainSettings


@dataclass(frozen=True)
class ArmFacts:
    """What is known of an arm without decoding with it.

    Attributes:
        name: of the arm, and of the method in the documents.
        settings: that it was trained with.
        parameters: trainable ones.
        training_tokens: read in training, with each seed.
        held_out_agreement: with the target, with each seed that measured it.
    """

    name: str
    settings: TrainSettings
    parameters: int
    training_tokens: tuple[int, ...] = ()
    held_out_agreement: tuple[float, ...] = ()


@dataclass(frozen=True)
class _AtTemperature:
    """All methods at one temperature."""

    temperature: float
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
            parameters=facts.parameters,
            expert_width=facts.settings.drafter.bank.expert_width,
            training_tokens=facts.training_tokens,
            held_out_agreement=fmean(agreement) if agreement else None,
            tau=arm.tau.pooled,
            tau_ratio=tau_ratio,
            acceptance_by_depth=arm.acceptance_by_depth,
            tokens_per_second=arm.speed.pooled,
            speed_ratio=ratio(arm.speed, base.speed),
            speedup=ratio(arm.speed, self.plain.speed),
            verdict=_verdict(facts.name, tau_ratio),
        )


def analyse(
    documents: Mapping[int, ComparisonDocument], arms: Sequence[ArmFacts], plain: str = PLAIN
) -> StudyResults:
    """Return what a study found.

    Args:
        documents: by seed, the comparison of all arms that were trained with it.
        arms: one of them the base; their names are those of methods in all documents.
        plain: name of the method that decodes without a drafter.

    Raises:
        DataError: something was not measured, or on other prompts, or on too few of them.
    """
    place_of = prompts_in(documents)
    measured = [
        _AtTemperature(
            temperature,
            counts_of(documents, plain, temperature, place_of),
            {arm.name: counts_of(documents, arm.name, temperature, place_of) for arm in arms},
        )
        for temperature in _temperatures(documents)
    ]
    rows = tuple(one.row(arm) for one in measured for arm in arms)
    return StudyResults(
        seeds=len(documents),
        prompts=len(place_of),
        note=_note(len(documents), sum(row.verdict != "base" for row in rows)),
        rows=rows,
        interactions=_interactions(measured, arms),
    )


def _temperatures(documents: Mapping[int, ComparisonDocument]) -> list[float]:
    methods = (one for document in documents.values() for one in document.methods)
    return list(dict.fromkeys(one.temperature for one in methods))


def _interactions(
    measured: Sequence[_AtTemperature], arms: Sequence[ArmFacts]
) -> tuple[TwoByTwo, ...]:
    cells = find_cells({arm.name: arm.settings for arm in arms})
    if cells is None:
        return ()
    taus = [
        (one.temperature, {name: arm.tau for name, arm in one.arms.items()}) for one in measured
    ]
    return tuple(two_by_two(cells, temperature, rates) for temperature, rates in taus)


def _verdict(arm: str, tau_ratio: Ratio) -> Verdict:
    if arm == BASE:
        return "base"
    if not tau_ratio.is_resolved:
        return "not resolved"
    return "better" if tau_ratio.value > 1 else "worse"


def _note(num_seeds: int, num_intervals: int) -> str:
    if num_seeds < 2:
        return (
            "One seed: the 95% intervals tell how prompts differ, not how trainings do; "
            "another seed may reverse any verdict."
        )
    share = "one in ten" if num_seeds == 2 else "one in twenty"  # two points tell little of spread
    return (
        f"95% intervals over {num_seeds} seeds and all prompts, paired. Verdicts are about tau; "
        f"of {num_intervals}, about {share} errs even where nothing differs."
    )
