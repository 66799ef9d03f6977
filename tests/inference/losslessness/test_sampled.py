"""Samples of a faulty decoder differ from samples of the target's distribution."""

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.losslessness import SHAPES, tiny_decoder
from helpers.models import tiny_llama
from scipy.stats import chisquare
from torch import Tensor

from inference.decoder import GenerateOutput, SpeculativeDecoder
from inference.draft_tree import SparseDistribution
from inference.losslessness.check import check_sampled, sample_continuations, sample_length
from inference.losslessness.records import Check, VerifySettings
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.sampled import (
    OTHER,
    REST,
    SequenceCells,
    chi_square,
    compare_samples,
)
from inference.trees.builder import TreeBuilder

SETTINGS = VerifySettings(samples=50, sample_length=3)


def _failed(checks: tuple[Check, ...]) -> set[str]:
    return {check.name for check in checks if not check.passed}


def _take_best(
    builder: TreeBuilder, distribution: SparseDistribution, noise: Tensor, children: int
) -> tuple[Tensor, Tensor]:
    """Return the likeliest candidates instead of sampled candidates."""
    return distribution.ids[:, :, :children], distribution.probs.log()[:, :, :children]


@pytest.mark.slow
def test_a_deterministic_tree_that_is_declared_as_sampled_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TreeBuilder, "_sample", _take_best)
    settings = SETTINGS.model_copy(update={"samples": 300})
    checks = check_sampled(tiny_decoder(SHAPES["sampled"]), [1, 2], settings)
    assert "sequence distribution" in _failed(checks)


def test_trees_that_are_verified_against_another_distribution_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sharpened(features: Tensor) -> Tensor:
        logits = correct(features)
        return logits * (8.0 if logits.shape[-2] > 1 else 1.0)  # trees, but not prompts

    decoder = tiny_decoder(SHAPES["deterministic"])
    correct = decoder.target.logits
    monkeypatch.setattr(decoder.target, "logits", sharpened)
    checks = check_sampled(decoder, [1, 2], SETTINGS)
    assert {"sequence distribution", "token ranks"} <= _failed(checks)


class _ForgettingTopK(SpeculativeDecoder):
    """A decoder that ignores top-k."""

    def generate(self, prompt: Any, **arguments: Any) -> GenerateOutput:
        return super().generate(prompt, **(arguments | {"top_k": 0}))


def test_tokens_that_the_processors_exclude_are_caught() -> None:
    settings = SETTINGS.model_copy(update={"top_k": 3, "samples": 20})
    decoder = tiny_decoder(kind=_ForgettingTopK)
    checks = check_sampled(decoder, [1, 2], settings)
    assert checks[2].impossible > 0
    assert "impossible tokens" in _failed(checks)


def _sampled(reference: Reference, settings: VerifySettings, bias: float) -> list[Tokens]:
    """Sample exactly, but after the first token take the likeliest with probability `bias`."""
    generator = torch.Generator().manual_seed(settings.seed)
    sequences: list[Tokens] = [()] * settings.samples
    for position in range(settings.sample_length or 0):
        distributions = dict(reference.distributions(sorted(set(sequences))))
        for index, sequence in enumerate(sequences):
            probs = distributions[sequence]
            if position and float(torch.rand(1, generator=generator)) < bias:
                token = int(probs.argmax())
            else:
                token = int(probs.multinomial(1, generator=generator))
            sequences[index] = (*sequence, token)
    return sequences


@pytest.mark.parametrize("bias", [0.0, 0.05])
def test_a_bias_of_five_percent_is_caught_and_exact_sampling_passes(bias: float) -> None:
    settings = VerifySettings(samples=1500, sample_length=3, temperature=2.0)
    reference = Reference(tiny_llama(vocab=61), [1, 2], settings.sampling)
    samples = _sampled(reference, settings, bias)
    checks = compare_samples(reference, samples, 3, 0, 1, settings)
    assert bool(_failed(checks)) == (bias > 0)


def test_cells_are_a_partition_of_all_continuations() -> None:
    reference = Reference(tiny_llama(vocab=5, eos_token_id=3), [1, 2], {"temperature": 0.7})
    cells = SequenceCells(reference, length=3, samples=100)
    assert sum(cells.expected.values()) == pytest.approx(100)
    exact = dict.fromkeys(cells.expected, 0.0)
    growing = {(): 100.0}
    for depth in range(1, 4):
        longer = {
            (*prefix, token): growing[prefix] * float(share)
            for prefix, probs in reference.distributions(list(growing))
            for token, share in enumerate(probs)
        }
        done = {key for key in longer if depth == 3 or key[-1] == 3}
        for key in done:
            exact[cells.cell_of(key)] += longer[key]
        growing = {key: value for key, value in longer.items() if key not in done}
    assert exact == pytest.approx(cells.expected)
    assert any(REST in cell for cell in cells.expected if cell != OTHER)


def test_the_chi_square_test_is_that_of_scipy() -> None:
    observed = {"a": 30, "b": 12, "c": 4, "d": 1, "e": 3}
    expected = {"a": 25.0, "b": 15.0, "c": 5.5, "d": 0.5, "e": 4.0}
    test = chi_square(Counter(observed), expected)
    joined = chisquare([30, 12, 8], [25.0, 15.0, 10.0])
    assert test.cells == 3
    assert test.statistic == pytest.approx(joined.statistic)
    assert test.p_value == pytest.approx(joined.pvalue)
    assert chi_square(Counter(a=7), {"a": 7.0}).p_value == 1.0


def test_samples_reach_past_the_first_tree() -> None:
    assert sample_length(tiny_decoder(), VerifySettings()) == 2 + 3
    assert sample_length(SpeculativeDecoder(tiny_llama()), VerifySettings()) == 3
    assert sample_length(tiny_decoder(), VerifySettings(sample_length=2)) == 2


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    decoder = tiny_decoder()
    sampled = [
        sample_continuations(
            decoder, [1, 2], SETTINGS.model_copy(update={"samples": 4, "seed": seed})
        )
        for seed in (0, 0, 1)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
