"""Analysis of a study: results from the `jakiro bench` documents of all seeds, and their table."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report import table_of
from inference.benchmark.settings import AUTOREGRESSIVE
from inference.benchmark.stats import DRAFTING, SPEED, TAU, Rate, Ratio, product, rate_of, ratio
from jakiro.utils.settings import Settings
from training.ablation.arms import BASE, Arm
from training.config import TrainSettings

# Settings in which the four arms of a 2 x 2 comparison may differ: these settings define the arms,
# make them equally large, or identify a run.
_DIFFERENT: Any = {
    "drafter": {"experts": {"num_experts", "active_experts", "intermediate_size"}},
    "objective": {"contrast_weight"},
    "seed": True,
    "run_folder": True,
}

_WORDS = {
    "experts": "several experts",
    "contrast": "contrastive loss",
    "interaction": "interaction of the two",
}

# Exponents of the tau of the four arms of a 2 x 2 comparison, in the order of `find_cells`.
_EXPONENTS = {
    "experts": (0.5, 0.5, -0.5, -0.5),
    "contrast": (0.5, -0.5, 0.5, -0.5),
    "interaction": (1.0, -1.0, -1.0, 1.0),
}

_Rates = Mapping[str, Rate]  # of each method, over all seeds and prompts

_COLUMNS = ("arm", "tau", "tau / base", "tokens/s / base", "draft ms")
_LEGEND = (
    "tau: tokens per forward pass of the target. Ratios have 95% intervals, paired over prompts "
    "and seeds; an asterisk marks a ratio of tau unless it includes 1. draft ms: per forward pass."
)


class ArmRow(Settings):
    """Results of one arm at one temperature.

    Attributes:
        conditional_acceptance_rate: for each depth, the share of the decoding steps with candidates
            to check at this depth that accepted one of them, averaged over seeds.
        draft_ratio: ratio of the seconds per draft; None if an arm never drafts.
        speedup: tokens per second over those of decoding without a drafter.
    """

    arm: str
    temperature: float
    parameters: int
    intermediate_size: int
    tau: float
    tau_ratio: Ratio
    conditional_acceptance_rate: tuple[float, ...] = ()
    tokens_per_second: float
    speed_ratio: Ratio
    speedup: Ratio
    seconds_per_draft: float
    draft_ratio: Ratio | None


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

    def __str__(self) -> str:
        effects = (
            f"{words} x{getattr(self, name).shown(3)}{' *' * getattr(self, name).is_resolved}"
            for name, words in _WORDS.items()
        )
        return f"tau with / without, at T = {self.temperature:g}: {', '.join(effects)}."


class StudyResults(Settings):
    """All results of a study."""

    seeds: int
    prompts: int
    note: str
    rows: tuple[ArmRow, ...]
    interactions: tuple[TwoByTwo, ...] = ()


def find_cells(arms: Mapping[str, TrainSettings]) -> dict[str, str] | None:
    """Return the names of the four arms of a 2 x 2 comparison; None if an arm is missing.

    The base must be one of the four. If several arms have both experts and contrastive loss, the
    first one that is part of such a comparison counts.
    """
    fields = {
        (True, True): "both",
        (True, False): "only_experts",
        (False, True): "only_contrast",
        (False, False): "neither",
    }
    for both in arms.values():
        cells = {
            _has_both(settings): name for name, settings in arms.items() if _is_cell(settings, both)
        }
        if all(_has_both(both)) and len(cells) == 4 and BASE in cells.values():
            return {field: cells[key] for key, field in fields.items()}
    return None


def two_by_two(cells: Mapping[str, str], temperature: float, rates: Mapping[str, Rate]) -> TwoByTwo:
    in_order = [rates[name] for name in cells.values()]
    effects = {
        name: product(list(zip(powers, in_order, strict=True)))
        for name, powers in _EXPONENTS.items()
    }
    return TwoByTwo(temperature=temperature, **cells, **effects)


def _is_cell(settings: TrainSettings, both: TrainSettings) -> bool:
    """Return whether an arm equals `both`, except that experts or contrastive loss may be off."""
    experts, others = settings.drafter.experts, both.drafter.experts
    has_same_experts = (experts.num_experts, experts.active_experts) == (
        others.num_experts,
        others.active_experts,
    )
    return (
        (has_same_experts or experts.num_experts == 1)
        and settings.objective.contrast_weight in (0.0, both.objective.contrast_weight)
        and settings.model_dump(exclude=_DIFFERENT) == both.model_dump(exclude=_DIFFERENT)
    )


def _has_both(settings: TrainSettings) -> tuple[bool, bool]:
    return settings.drafter.experts.num_experts > 1, settings.objective.contrast_weight > 0


def analyse(documents: Mapping[int, ComparisonDocument], arms: Sequence[Arm]) -> StudyResults:
    methods = next(iter(documents.values())).methods
    prompts = sorted({sample.prompt for sample in methods[0].samples})
    cells = find_cells({arm.name: arm.settings for arm in arms})
    rows, interactions = [], []
    for temperature in dict.fromkeys(method.temperature for method in methods):
        samples = {
            name: [document.figures(name, temperature).samples for document in documents.values()]
            for name in (AUTOREGRESSIVE, *(arm.name for arm in arms))
        }
        taus, speeds, drafting = (
            {name: rate_of(of_method, fields, prompts) for name, of_method in samples.items()}
            for fields in (TAU, SPEED, DRAFTING)
        )
        rows += [_row(arm, temperature, documents, taus, speeds, drafting) for arm in arms]
        if cells is not None:
            interactions.append(two_by_two(cells, temperature, taus))
    return StudyResults(
        seeds=len(documents),
        prompts=len(prompts),
        note=_note(len(documents), len(prompts), rows),
        rows=tuple(rows),
        interactions=tuple(interactions),
    )


def _row(
    arm: Arm,
    temperature: float,
    documents: Mapping[int, ComparisonDocument],
    taus: _Rates,
    speeds: _Rates,
    drafting: _Rates,
) -> ArmRow:
    figures = [document.figures(arm.name, temperature) for document in documents.values()]
    rates = [one.conditional_acceptance_rate for one in figures]
    depths = range(max(map(len, rates)))  # not all seeds reach the same depth
    drafts = (drafting[arm.name], drafting[BASE])
    return ArmRow(
        arm=arm.name,
        temperature=temperature,
        parameters=arm.parameters,
        intermediate_size=arm.width,
        tau=taus[arm.name].pooled,
        tau_ratio=ratio(taus[arm.name], taus[BASE]),
        conditional_acceptance_rate=tuple(
            fmean(one[depth] for one in rates if len(one) > depth) for depth in depths
        ),
        tokens_per_second=speeds[arm.name].pooled,
        speed_ratio=ratio(speeds[arm.name], speeds[BASE]),
        speedup=ratio(speeds[arm.name], speeds[AUTOREGRESSIVE]),
        seconds_per_draft=drafts[0].pooled,
        draft_ratio=ratio(*drafts) if all(rate.top.sum(axis=1).all() for rate in drafts) else None,
    )


def _note(num_seeds: int, num_prompts: int, rows: Sequence[ArmRow]) -> str:
    if all(row.tau == 1 for row in rows):
        return "No arm accepted a draft, so this study says nothing; train longer."
    if num_seeds < 2:
        return (
            "With one seed, the 95% intervals cover the spread over prompts, not over trainings; "
            "another seed may reverse any difference."
        )
    # With two seeds, the spread over seeds is estimated poorly.
    rate = "one in ten" if num_seeds == 2 else "one in twenty"
    num_ratios = sum(row.arm != BASE for row in rows)
    return (
        f"The intervals cover {num_seeds} seeds and {num_prompts} prompts. Even if no arm differed "
        f"from the base, about {rate} of the {num_ratios} ratios of tau would have an asterisk."
    )


def render(results: StudyResults) -> Iterator[Table | str]:
    """Yield a table for each temperature, and remarks."""
    for temperature in dict.fromkeys(row.temperature for row in results.rows):
        rows = [row for row in results.rows if row.temperature == temperature]
        yield table_of(f"T = {temperature:g}", _COLUMNS, map(_cells, rows))
    yield _LEGEND
    yield results.note
    yield from map(str, results.interactions)


def _cells(row: ArmRow) -> list[str]:
    tau = row.tau_ratio.shown(3) + " *" * row.tau_ratio.is_resolved
    ratios = ["1", "1"] if row.arm == BASE else [tau, row.speed_ratio.shown(2)]
    return [row.arm, f"{row.tau:.2f}", *ratios, f"{row.seconds_per_draft * 1e3:.2f}"]
