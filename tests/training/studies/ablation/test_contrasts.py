"""The 2 x 2 comparison of experts and contrastive loss."""

import math

import numpy as np
import pytest
from helpers.studies import FOUR_CELLS, made_up_arm

from inference.benchmark.stats import Rate
from jakiro.drafter_settings import DrafterSettings, ExpertsSettings
from training.studies.ablation.contrasts import Cells, find_cells, two_by_two

CELLS = Cells("both", "experts", "contrast", "neither")


def _rate(tau: float) -> Rate:
    """Return the rate `tau` for three seeds and five prompts, without noise."""
    return Rate(np.full((3, 5), tau * 10), np.full((3, 5), 10.0))


def test_effects_are_averages_over_the_other_factor() -> None:
    rates = {"both": _rate(3.0), "experts": _rate(2.0), "contrast": _rate(1.2), "neither": _rate(1)}
    found = two_by_two(CELLS, 0.8, rates)
    assert found.experts.value == pytest.approx(math.sqrt(3.0 / 1.2 * 2.0))
    assert found.contrast.value == pytest.approx(math.sqrt(3.0 / 2.0 * 1.2))
    assert found.interaction.value == pytest.approx(3.0 / 2.0 / 1.2)
    assert found.sentence.startswith("tau with / without, at T = 0.8: several experts x2.236 [")


def test_the_four_cells_are_found_among_other_arms() -> None:
    others = [
        made_up_arm("experts-4", drafter={"experts": {"num_experts": 4}}),
        made_up_arm("weaker", objective={"contrast_weight": 0.01}),
        made_up_arm("another", objective={"contrast_weight": 0.0, "token_loss": "reverse_kl"}),
    ]
    arms = {arm.name: arm.settings for arm in (*FOUR_CELLS, *others)}
    assert find_cells(arms) == Cells("base", "contrast-off", "experts-off", "both-off")
    del arms["both-off"]
    assert find_cells(arms) is None
    assert find_cells({"base": arms["contrast-off"]}) is None


@pytest.mark.parametrize("base", range(4))
def test_the_base_may_be_any_of_the_four_cells(base: int) -> None:
    names = ["both", "experts", "contrast", "neither"]
    names[base] = "base"
    arms = {name: arm.settings for name, arm in zip(names, FOUR_CELLS, strict=True)}
    assert find_cells(arms) == Cells(*names)
    arms["cell"] = arms["base"]
    arms["base"] = arms["cell"].model_copy(update={"drafter": DrafterSettings(norm_eps=1e-5)})
    assert find_cells(arms) is None  # there is such a comparison, but without the base


def test_of_several_numbers_of_experts_the_first_counts() -> None:
    both, only_experts, only_contrast, neither = (arm.settings for arm in FOUR_CELLS)
    sparse = DrafterSettings(experts=ExpertsSettings(num_experts=16, active_experts=2))
    more, alone = (each.model_copy(update={"drafter": sparse}) for each in (both, only_experts))
    arms = {"base": neither, "e": only_experts, "c": only_contrast, "sparse": more, "two": both}
    assert find_cells(arms) == Cells("two", "e", "c", "base")
    assert find_cells({**arms, "alone": alone}) == Cells("sparse", "alone", "c", "base")
    all_run = DrafterSettings(experts=ExpertsSettings(num_experts=16))
    dense = only_experts.model_copy(update={"drafter": all_run})
    assert find_cells({**arms, "dense": dense}) == Cells("two", "e", "c", "base")
