"""The results of studies with known effects, and their table."""

import math
from io import StringIO

import numpy as np
import pytest
from helpers.studies import FOUR_CELLS, made_up_arm, made_up_documents
from rich.console import Console

from inference.benchmark.stats import Rate
from training.ablation.analysis import (
    StudyResults,
    analyse,
    find_cells,
    render,
    two_by_two,
)


def test_an_arm_that_is_better_by_a_tenth_is_found() -> None:
    arms = [made_up_arm(name) for name in ("base", "better", "worse")]
    documents = made_up_documents(
        {"base": 0.0, "better": math.log(1.1), "worse": math.log(0.9)},
        temperatures=(0.0, 1.0),
        number=1,
    )
    results = analyse(documents, arms)
    base, better, worse = (row for row in results.rows if row.temperature == 1.0)
    assert (base.arm, base.tau_ratio.low, base.tau_ratio.high) == ("base", 1.0, 1.0)
    assert better.tau_ratio.low > 1
    assert worse.tau_ratio.high < 1
    better = results.rows[1]
    assert better.tau_ratio.low < 1.1 < better.tau_ratio.high
    assert better.tau_ratio.value == pytest.approx(1.1, rel=0.03)
    assert results.seeds == 3
    assert better.speed_ratio.value == pytest.approx(better.tau_ratio.value, rel=1e-3)


def test_figures_are_pooled_over_seeds_prompts_and_repeats_without_first_tokens() -> None:
    documents = made_up_documents({"base": 0.0}, seeds=2, repeats=3)
    (row,) = analyse(documents, [made_up_arm("base")]).rows
    figures = [document.figures("base", 0.0) for document in documents.values()]
    samples = [sample for each in figures for sample in each.samples]
    tokens, forwards = sum(s.tokens for s in samples), sum(s.target_forwards for s in samples)
    seconds = sum(s.seconds for s in samples)
    assert row.tau == pytest.approx((tokens - 2 * len(samples)) / forwards)
    assert row.tokens_per_second == pytest.approx(tokens / seconds)
    assert row.speedup.value == pytest.approx(row.tokens_per_second / 100, rel=1e-3)
    assert row.seconds_per_draft == pytest.approx(sum(s.draft for s in samples) / forwards)
    assert row.draft_ratio is not None
    assert row.draft_ratio.value == 1.0
    assert row.tau_ratio.low == row.tau_ratio.high == 1.0
    depths = [each.conditional_acceptance_rate for each in figures]
    assert row.conditional_acceptance_rate == pytest.approx(np.mean(depths, axis=0))


def test_planted_effects_and_their_interaction_are_recovered() -> None:
    experts, contrast, together = 0.10, 0.05, 0.08
    effects = {
        "base": experts + contrast + together,
        "contrast-off": experts,
        "experts-off": contrast,
        "both-off": 0.0,
    }
    (found,) = analyse(made_up_documents(effects, prompts=60), FOUR_CELLS).interactions
    assert found.experts.low < math.exp(experts + together / 2) < found.experts.high
    assert found.contrast.low < math.exp(contrast + together / 2) < found.contrast.high
    assert found.interaction.low < math.exp(together) < found.interaction.high
    assert found.experts.is_resolved
    assert f"experts x{found.experts.value:.3f} [" in str(found)


def _cells(*names: str) -> dict[str, str]:
    fields = ("both", "only_experts", "only_contrast", "neither")
    return dict(zip(fields, names, strict=True))


def _rate(tau: float) -> Rate:
    """Return the rate `tau` for three seeds and five prompts, without noise."""
    return Rate(np.full((3, 5), tau * 10), np.full((3, 5), 10.0))


def test_effects_are_averages_over_the_other_factor() -> None:
    rates = {"both": _rate(3.0), "experts": _rate(2.0), "contrast": _rate(1.2), "neither": _rate(1)}
    found = two_by_two(_cells(*rates), 0.8, rates)
    assert found.experts.value == pytest.approx(math.sqrt(3.0 / 1.2 * 2.0))
    assert found.contrast.value == pytest.approx(math.sqrt(3.0 / 2.0 * 1.2))
    assert found.interaction.value == pytest.approx(3.0 / 2.0 / 1.2)
    assert str(found).startswith("tau with / without, at T = 0.8: several experts x2.236 [")


def test_the_four_cells_are_found_among_other_arms() -> None:
    others = [
        made_up_arm("experts-4", drafter={"experts": {"num_experts": 4}}),
        made_up_arm("weaker", objective={"contrast_weight": 0.01}),
        made_up_arm("another", objective={"contrast_weight": 0.0, "token_loss": "reverse_kl"}),
    ]
    arms = {arm.name: arm.settings for arm in (*FOUR_CELLS, *others)}
    assert find_cells(arms) == _cells("base", "contrast-off", "experts-off", "both-off")
    del arms["both-off"]
    assert find_cells(arms) is None
    assert find_cells({"base": arms["contrast-off"]}) is None


def _printed(results: StudyResults, width: int = 80) -> str:
    console = Console(file=StringIO(), record=True, width=width)
    for part in render(results):
        console.print(part)
    return console.export_text()


def test_a_terminal_of_80_columns_shows_each_arm_on_a_line() -> None:
    effects = {"base": 0.0, "a": 0.0, "contrast-loss-off": math.log(0.7)}
    documents = made_up_documents(effects, temperatures=(0.0, 1.0), number=1)
    results = analyse(documents, [made_up_arm(name) for name in effects])
    text = _printed(results)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    for row in results.rows:
        tau = row.tau_ratio.shown(3) + " *" * (row.arm == "contrast-loss-off")
        ratios = "1 1" if row.arm == "base" else f"{tau} {row.speed_ratio.shown(2)}"
        assert f"{row.arm} {row.tau:.2f} {ratios} 2.00" in lines
    assert results.note in " ".join(text.split())
    assert "overlap" not in text
