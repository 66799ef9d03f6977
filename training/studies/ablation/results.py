"""Results of a study, as stored in JSON."""

from typing import Literal

from inference.benchmark.stats import Ratio
from jakiro.utils.settings import Settings

ArmVerdict = Literal["base", "better", "worse", "not resolved"]


class ArmRow(Settings):
    """Results of one arm at one temperature.

    Attributes:
        validation_agreement: fraction of validation positions at which drafter and target agree on
            the most likely token, averaged over seeds; None if it was not measured.
        conditional_acceptance_rate: for each depth, the share of the decoding steps with candidates
            to check at this depth that accepted one of them, averaged over seeds.
        verdict: "better" if the interval of `tau_ratio` lies above 1, "worse" if it lies below 1,
            "not resolved" if it contains 1, and "base" for the base.
    """

    arm: str
    temperature: float
    parameters: int
    intermediate_size: int
    training_tokens: tuple[int, ...] = ()
    validation_agreement: float | None = None
    tau: float
    tau_ratio: Ratio
    conditional_acceptance_rate: tuple[float, ...] = ()
    tokens_per_second: float
    seconds_per_draft: float
    speed_ratio: Ratio
    speedup: Ratio
    verdict: ArmVerdict


class TwoByTwo(Settings):
    """Effects of experts and of contrastive loss at one temperature, and their interaction.

    Here, an arm "with experts" has several experts, and an arm "without experts" has only one.

    Attributes:
        experts: ratio of tau with experts to tau without experts, as the geometric mean of the
            ratios with and without contrastive loss.
        contrast: ratio of tau with contrastive loss to tau without contrastive loss, as the
            geometric mean of the ratios with and without experts.
        interaction: tau(both) tau(neither) / (tau(only experts) tau(only contrast)). A value above
            1 means that experts increase tau by a larger factor with contrastive loss than without
            it, and vice versa.
    """

    temperature: float
    both: str
    only_experts: str
    only_contrast: str
    neither: str
    experts: Ratio
    contrast: Ratio
    interaction: Ratio
    sentence: str


class ArmExperts(Settings):
    """Diversity of an arm's experts on validation data, averaged over seeds.

    Attributes:
        top_overlap: fraction of their four most likely tokens that two experts have in common,
            averaged over pairs of experts; None if the experts have no separate distributions.
        router_entropy: entropy of the router's weights at a position, in nats, averaged over
            positions.
        load_entropy: entropy of the router's mean weights, in nats.
        by_seed: `top_overlap`, `router_entropy` and `load_entropy` for each seed.
    """

    arm: str
    top_overlap: float | None
    router_entropy: float
    load_entropy: float
    by_seed: tuple[tuple[float | None, float, float], ...]


class StudyResults(Settings):
    """All results of a study.

    Attributes:
        interactions: interactions for every temperature; empty unless the study contains all four
            arms of a 2 x 2 comparison.
    """

    version: int = 2
    seeds: int
    prompts: int
    note: str
    rows: tuple[ArmRow, ...]
    interactions: tuple[TwoByTwo, ...] = ()
    experts: tuple[ArmExperts, ...] = ()

    def at(self, temperature: float) -> list[ArmRow]:
        """Return the rows of a temperature."""
        return [row for row in self.rows if row.temperature == temperature]
