"""The results of studies with known effects."""

import math

import numpy as np
import pytest
from helpers.studies import FOUR_CELLS, made_up_arm, made_up_documents

from jakiro.errors import DataError
from training.studies.ablation.analysis import analyse


def test_an_arm_that_is_better_by_a_tenth_is_found() -> None:
    arms = [made_up_arm(name) for name in ("base", "better", "worse")]
    documents = made_up_documents(
        {"base": 0.0, "better": math.log(1.1), "worse": math.log(0.9)},
        temperatures=(0.0, 1.0),
        number=1,
    )
    results = analyse(documents, arms)
    assert [(row.arm, row.verdict) for row in results.at(1.0)] == [
        ("base", "base"),
        ("better", "better"),
        ("worse", "worse"),
    ]
    better = results.at(0.0)[1]
    assert better.tau_ratio.low < 1.1 < better.tau_ratio.high
    assert better.tau_ratio.value == pytest.approx(1.1, rel=0.03)
    assert len(better.tau_ratio.by_seed) == results.seeds == 3
    assert better.speed_ratio.value == pytest.approx(better.tau_ratio.value, rel=1e-3)
    assert better.validation_agreement == pytest.approx(0.6)
    assert better.training_tokens == (1000, 1001, 1002)


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
    forwards = sum(each.target_forwards for each in figures)
    assert row.seconds_per_draft == pytest.approx(sum(f.seconds.draft for f in figures) / forwards)
    assert row.tau_ratio.low == row.tau_ratio.high == 1.0
    depths = [each.conditional_acceptance_rate for each in figures]
    assert row.conditional_acceptance_rate == pytest.approx(np.mean(depths, axis=0))


def test_the_note_mentions_a_single_seed() -> None:
    results = analyse(made_up_documents({"base": 0.0}, seeds=1), [made_up_arm("base")])
    assert results.seeds == 1
    assert "another seed may reverse any verdict" in results.note


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
    assert f"experts x{found.experts.value:.3f} [" in found.sentence


def test_documents_that_cannot_be_compared_are_refused() -> None:
    documents = made_up_documents({"base": 0.0})
    fewer = made_up_documents({"base": 0.0}, prompts=19)
    with pytest.raises(DataError, match="different prompts"):
        analyse({0: documents[0], 1: fewer[1]}, [made_up_arm("base")])
