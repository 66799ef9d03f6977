"""The 2 x 2 of experts and contrastive loss: does each help, and do they help each other?"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from training.ablation.arms import BASE
from training.ablation.results import TwoByTwo
from training.ablation.uncertainty import Rate, Ratio, product
from training.config import TrainSettings

# What tells the cells apart, makes them equally large, or only names a run.
_APART: Any = {
    "drafter": {"bank": {"num_experts", "expert_width"}},
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
        DataError: as for `training.ablation.uncertainty.product`.
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
        settings.drafter.bank.num_experts in (1, base.drafter.bank.num_experts)
        and settings.objective.contrast_weight in (0.0, base.objective.contrast_weight)
        and settings.model_dump(exclude=_APART) == base.model_dump(exclude=_APART)
    )


def _has_experts(settings: TrainSettings) -> bool:
    return settings.drafter.bank.num_experts > 1


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
