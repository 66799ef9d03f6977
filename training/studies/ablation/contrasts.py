"""The 2 x 2 comparison of experts and contrastive loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from inference.benchmark.stats import Rate, Ratio, product
from training.config import TrainSettings
from training.studies.ablation.arms import BASE
from training.studies.ablation.results import TwoByTwo

# Settings in which the four arms may differ: these settings define the arms, make them equally
# large, or identify a run.
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
    """
    for both in arms.values():
        found = {
            (_has_experts(settings), _has_contrast(settings)): name
            for name, settings in arms.items()
            if _is_cell(settings, both)
        }
        if (
            _has_experts(both)
            and _has_contrast(both)
            and len(found) == 4
            and BASE in found.values()
        ):
            keys = ((True, True), (True, False), (False, True), (False, False))
            return Cells(*(found[key] for key in keys))
    return None


def two_by_two(cells: Cells, temperature: float, rates: Mapping[str, Rate]) -> TwoByTwo:
    """Return the effects of experts and contrastive loss, and the interaction, as ratios of tau."""
    exponents = {
        "experts": (0.5, 0.5, -0.5, -0.5),
        "contrast": (0.5, -0.5, 0.5, -0.5),
        "interaction": (1.0, -1.0, -1.0, 1.0),
    }
    in_order = [rates[name] for name in cells]
    effects = {
        name: product(list(zip(powers, in_order, strict=True)))
        for name, powers in exponents.items()
    }
    words = (f"{_WORDS[name]} {_in_words(ratio)}" for name, ratio in effects.items())
    sentence = f"tau with / without, at T = {temperature:g}: {', '.join(words)}."
    return TwoByTwo(temperature=temperature, sentence=sentence, **cells._asdict(), **effects)


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


def _has_experts(settings: TrainSettings) -> bool:
    return settings.drafter.experts.num_experts > 1


def _has_contrast(settings: TrainSettings) -> bool:
    return settings.objective.contrast_weight > 0


def _in_words(effect: Ratio) -> str:
    return f"x{effect.shown(3)}{'' if effect.is_resolved else ' (not resolved)'}"
