"""What a study found, as it is kept in JSON."""

from typing import Literal

from jakiro.utils.settings import Settings
from training.studies.ablation.uncertainty import Ratio

SCHEMA_VERSION = 1

Verdict = Literal["base", "better", "worse", "not resolved"]


class ArmRow(Settings):
    """One arm at one temperature with one kind of trees.

    Attributes:
        arm: its name.
        temperature: 0 is greedy.
        trees: the kind's label; None where there is only one kind.
        parameters: trainable ones.
        intermediate_size: that made it as large as the base.
        training_tokens: read in training, with each seed.
        held_out_agreement: share of held-out positions where drafter and target agree on the best
            token, the mean over seeds; None if it was not measured.
        tau: tokens per target forward, pooled over seeds and prompts; plain decoding has 1.
        tau_ratio: over that of the base.
        acceptance_by_depth: of the rounds with a candidate to try at that depth, the share that
            accepted one; means over seeds.
        tokens_per_second: pooled likewise, reading the prompt included.
        seconds_per_draft: of the drafter's work in a round, pooled likewise.
        speed_ratio: of tokens per second over those of the base.
        speedup: of tokens per second over plain decoding.
        verdict: whether the interval of `tau_ratio` lies above 1, below 1, or around it.
    """

    arm: str
    temperature: float
    trees: str | None = None
    parameters: int
    intermediate_size: int
    training_tokens: tuple[int, ...] = ()
    held_out_agreement: float | None = None
    tau: float
    tau_ratio: Ratio
    acceptance_by_depth: tuple[float, ...] = ()
    tokens_per_second: float
    seconds_per_draft: float | None = None
    speed_ratio: Ratio
    speedup: Ratio
    verdict: Verdict


class TwoByTwo(Settings):
    """Experts x contrastive loss at one temperature: what each does, and both together.

    Attributes:
        temperature: 0 is greedy.
        trees: as for the arms.
        both: the arm with experts and contrast.
        only_experts: the arm without contrast.
        only_contrast: the arm without experts.
        neither: the arm without either.
        experts: ratio of tau with experts to that without, mean over both settings of contrast.
        contrast: likewise.
        interaction: tau(both) tau(neither) / (tau(only experts) tau(only contrast)): above 1, each
            gains more where the other one is.
        sentence: all of it in words.
    """

    temperature: float
    trees: str | None = None
    both: str
    only_experts: str
    only_contrast: str
    neither: str
    experts: Ratio
    contrast: Ratio
    interaction: Ratio
    sentence: str


class ArmExperts(Settings):
    """How different the experts of an arm are on held-out text, means over seeds.

    Attributes:
        arm: its name.
        top_overlap: of the four likeliest tokens, the share that two experts have in common, mean
            over pairs of experts; None where experts have no laws of their own.
        router_entropy: of the router's weights, mean over positions, in nats.
        load_entropy: of the mean weights, in nats.
        by_seed: the same with each seed, in this order.
    """

    arm: str
    top_overlap: float | None
    router_entropy: float
    load_entropy: float
    by_seed: tuple[tuple[float | None, float, float], ...]


class ArmSweep(Settings):
    """What dev prompts said of one arm.

    Attributes:
        arm: its name.
        tau: of every temperature, that with each value: tokens per target forward, pooled over dev
            prompts; temperatures and values in the sweep's order.
        score: with each value, the geometric mean of tau over the temperatures.
        chosen: the value of the highest score, the smallest of several.
    """

    arm: str
    tau: tuple[tuple[float, ...], ...]
    score: tuple[float, ...]
    chosen: float


class SweepResults(Settings):
    """A setting of which every arm has its own value, chosen on dev prompts.

    Attributes:
        key: the setting, with dots.
        values: that were tried.
        temperatures: at which.
        seed: with which.
        prompts: dev prompts, none of which is a test prompt.
        arms: in the study's order.
    """

    key: str
    values: tuple[float, ...]
    temperatures: tuple[float, ...]
    seed: int
    prompts: int
    arms: tuple[ArmSweep, ...]

    def chosen(self, arm: str) -> float:
        """Return the value of an arm."""
        return next(one.chosen for one in self.arms if one.arm == arm)


class StudyResults(Settings):
    """All of it.

    Attributes:
        version: of this schema.
        seeds: trainings of every arm.
        prompts: that every arm was measured on.
        note: how to read the intervals.
        rows: of every temperature and kind of trees, its arms in the study's order.
        interactions: of every temperature and kind of trees; empty without all four arms.
        experts: of every arm; empty where it was not measured.
        sweep: how each arm came by its value of a setting; None if nothing was swept.
    """

    version: int = SCHEMA_VERSION
    seeds: int
    prompts: int
    note: str
    rows: tuple[ArmRow, ...]
    interactions: tuple[TwoByTwo, ...] = ()
    experts: tuple[ArmExperts, ...] = ()
    sweep: SweepResults | None = None

    @property
    def temperatures(self) -> list[float]:
        """All temperatures, in the study's order."""
        return list(dict.fromkeys(row.temperature for row in self.rows))

    @property
    def trees(self) -> list[str | None]:
        """All kinds of trees, in the study's order."""
        return list(dict.fromkeys(row.trees for row in self.rows))

    @property
    def groups(self) -> list[list[ArmRow]]:
        """The rows of every temperature and kind of trees."""
        groups: dict[tuple[float, str | None], list[ArmRow]] = {}
        for row in self.rows:
            groups.setdefault((row.temperature, row.trees), []).append(row)
        return list(groups.values())

    def at(self, temperature: float, trees: str | None = None) -> list[ArmRow]:
        """Return the rows of a temperature and a kind of trees."""
        return [row for row in self.rows if (row.temperature, row.trees) == (temperature, trees)]
