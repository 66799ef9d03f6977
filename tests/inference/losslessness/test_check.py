"""Verification passes a correct decoder, catches planted faults and raises no false alarms."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from scipy.stats import chisquare
from torch import Tensor

from inference.decoder import GenerateOutput, SpeculativeDecoder
from inference.draft_tree import SparseDistribution
from inference.losslessness import Check, VerifyReport, VerifySettings, verify_losslessness
from inference.losslessness.check import check_greedy
from inference.losslessness.records import SupportCheck
from inference.losslessness.reference import NEAR_TIE_ULPS, Reference, Tokens, rounding
from inference.losslessness.sampled import (
    OTHER,
    REST,
    SampledContinuation,
    SequenceCells,
    check_sampled,
    chi_square,
    sample_continuations,
    sample_length,
)
from inference.trees.builder import TreeBuilder
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter

SETTINGS = VerifySettings(max_new_tokens=12, samples=50, sample_length=3)
SHAPES = {
    "deterministic": TreeShape(children=3, breadth=2, num_nodes=7),
    "sampled": TreeShape(children=2, breadth=1, sampled=True),
}
PROMPTS = [[1, 2], [3, 1, 4]]
THRESHOLD = 0.0005


def _decoder(
    shape: TreeShape = SHAPES["sampled"],
    kind: type[SpeculativeDecoder] = SpeculativeDecoder,
    **model: Any,
) -> SpeculativeDecoder:
    target = tiny_llama(**{"vocab": 7, **model})
    return kind(target, tiny_drafter(TargetAdapter(target)), tree=shape)


def _failed(checks: tuple[Check, ...]) -> set[str]:
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_correct_decoder_passes_every_check(shape: TreeShape) -> None:
    heard: list[Check] = []
    report = verify_losslessness(_decoder(shape), PROMPTS, SETTINGS, heard.append)
    assert report.passed
    assert tuple(heard) == report.checks
    greedy, sequences, ranks, support = report.checks
    assert (greedy.prompts, greedy.tokens, greedy.differences) == (2, 24, ())
    assert (sequences.counted, ranks.counted, support.tokens) == (50, 100, 150)
    assert sequences.cells > 3
    assert sequences.drafted > 20


def test_decoding_that_ends_early_or_cuts_the_distribution_passes_too() -> None:
    decoder = _decoder(eos_token_id=6)
    settings = VerifySettings(
        max_new_tokens=20,
        samples=50,
        sample_length=3,
        sampled_prompts=2,
        temperature=0.8,
        top_p=0.8,
        top_k=4,
    )
    report = verify_losslessness(decoder, PROMPTS, settings)
    assert report.passed
    assert len(report.checks) == 1 + 2 * 3
    assert report.checks[3].tokens < 50 * 3  # some continuations ended early


def _take_best(
    builder: TreeBuilder, distribution: SparseDistribution, children: int
) -> tuple[Tensor, Tensor]:
    """Return the likeliest candidates instead of sampled candidates."""
    return distribution.ids[:, :, :children], distribution.probs.log()[:, :, :children]


def test_a_deterministic_tree_that_is_declared_as_sampled_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TreeBuilder, "_sample", _take_best)
    settings = SETTINGS.model_copy(update={"samples": 100})
    checks = check_sampled(_decoder(SHAPES["sampled"]), [1, 2], settings, 1, THRESHOLD)
    assert "sequence distribution" in _failed(checks)


def test_trees_that_are_verified_against_another_distribution_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sharpened(features: Tensor) -> Tensor:
        logits = correct(features)
        return logits * (8.0 if logits.shape[-2] > 1 else 1.0)  # trees, but not prompts

    decoder = _decoder(SHAPES["deterministic"])
    correct = decoder.target.logits
    monkeypatch.setattr(decoder.target, "logits", sharpened)
    checks = check_sampled(decoder, [1, 2], SETTINGS, 1, THRESHOLD)
    assert {"sequence distribution", "token ranks"} <= _failed(checks)


class _ForgettingTopK(SpeculativeDecoder):
    """A decoder that ignores top-k."""

    def generate(self, prompt: Any, **arguments: Any) -> GenerateOutput:
        return super().generate(prompt, **(arguments | {"top_k": 0}))


def test_tokens_that_the_processors_exclude_are_caught() -> None:
    settings = SETTINGS.model_copy(update={"top_k": 3, "samples": 20})
    decoder = _decoder(kind=_ForgettingTopK)
    checks = check_sampled(decoder, [1, 2], settings, 1, THRESHOLD)
    assert checks[2].impossible > 0
    assert "impossible tokens" in _failed(checks)


class _WrongAtFive(SpeculativeDecoder):
    """A decoder whose fifth new token is not the best token."""

    def generate(self, prompt: Any, **arguments: Any) -> GenerateOutput:
        output = super().generate(prompt, **arguments)
        new = [*output.new_token_ids]
        new[4] = (new[4] + 1) % 7
        return replace(output, new_token_ids=new)


class _EndingEarly(SpeculativeDecoder):
    def generate(self, prompt: Any, **arguments: Any) -> GenerateOutput:
        output = super().generate(prompt, **arguments)
        return replace(output, new_token_ids=output.new_token_ids[:4])


def test_a_greedy_difference_is_reported_with_its_position() -> None:
    decoder = _decoder(kind=_WrongAtFive)
    check = check_greedy(decoder, [[1, 2], [3]], 8)
    assert not check.passed
    first, second = check.differences
    assert (first.prompt, second.prompt, check.tokens) == (1, 2, 8)
    assert first.position == second.position == 5
    assert first.decoder_token == (first.target_token + 1) % 7
    assert first.gap > 0 == first.rounding
    assert "prompt 1, new token 5: target" in check.details[0]


def test_a_continuation_that_ends_too_early_differs() -> None:
    check = check_greedy(_decoder(kind=_EndingEarly), [[1, 2]], 8)
    (difference,) = check.differences
    assert not check.passed
    assert (difference.position, difference.decoder_token, difference.gap) == (5, None, None)
    assert "logit gap none" in str(difference)


@pytest.mark.parametrize(("nearness", "passes"), [(1.0, True), (0.9, False)])
def test_in_half_precision_a_near_tie_is_counted_but_is_not_a_failure(
    nearness: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(self: Reference, prefix: Tokens) -> Tensor:
        return torch.full((7,), 20.0).scatter_(0, torch.tensor([greedy[len(prefix)]]), top)

    decoder = _decoder(kind=_WrongAtFive)
    decoder.target.model.to(torch.bfloat16)
    decoder.drafter = None
    greedy = Reference(decoder.target.model, [1, 2]).greedy(8)
    top = 20.0 + rounding(torch.bfloat16, [20.0]) / nearness
    monkeypatch.setattr(Reference, "greedy_scores", scores)
    check = check_greedy(decoder, [[1, 2]], 8)
    assert check.passed == passes
    assert check.differences[0].is_near_tie == passes
    assert ("0 differences, 1 near-tie;" in str(check)) == passes


@pytest.mark.parametrize(("dtype", "advises"), [("bfloat16", True), ("float32", False)])
def test_a_failure_in_half_precision_advises_single_precision(dtype: str, advises: bool) -> None:
    failed = SupportCheck(prompt=1, tokens=9, impossible=1, at_the_cut=0, drafted=1)
    report = VerifyReport(target="t", dtype=dtype, settings=SETTINGS, checks=(failed,))
    assert not report.passed
    assert report.summary.startswith("0 of 1 checks passed")
    assert ("float32" in report.summary) == advises


def test_rounding_is_units_in_the_last_place_of_the_largest_logit() -> None:
    assert rounding(torch.float32, [20.0]) == 0
    assert rounding(torch.bfloat16, [-20.0, 3.0]) == NEAR_TIE_ULPS * 0.125
    assert rounding(torch.float16, [16.0]) == NEAR_TIE_ULPS * 2.0**-6


def test_a_token_is_at_the_cut_only_if_rounding_could_keep_it() -> None:
    model = tiny_llama(vocab=7).to(torch.bfloat16)
    reference = Reference(model, [1, 2], {"temperature": 1.0, "top_k": 3})
    head = model.get_output_embeddings()
    order = reference.greedy_scores(()).argsort(descending=True).tolist()
    with torch.no_grad():
        head.weight[order[3]] = head.weight[order[2]]
    assert reference.is_at_the_cut((), order[3])
    assert not reference.is_at_the_cut((), order[6])
    assert not Reference(model.float(), [1, 2], {"top_k": 3}).is_at_the_cut((), order[3])


def _sampled(
    reference: Reference, settings: VerifySettings, bias: float
) -> list[SampledContinuation]:
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
    return [SampledContinuation(sequence, 0) for sequence in sequences]


@pytest.mark.parametrize("bias", [0.0, 0.05])
def test_a_bias_of_five_percent_is_caught_and_exact_sampling_passes(
    bias: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(vocab=61)
    settings = VerifySettings(samples=1500, sample_length=3, temperature=2.0)
    reference = Reference(decoder.target.model, [1, 2], settings.sampling)
    samples = _sampled(reference, settings, bias)
    monkeypatch.setattr("inference.losslessness.sampled.sample_continuations", lambda *_: samples)
    checks = check_sampled(decoder, [1, 2], settings, 1, THRESHOLD)
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
    assert sample_length(_decoder(), VerifySettings()) == 2 + 3
    assert sample_length(SpeculativeDecoder(tiny_llama()), VerifySettings()) == 3
    assert sample_length(_decoder(), VerifySettings(sample_length=2)) == 2


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    decoder = _decoder()
    sampled = [
        sample_continuations(
            decoder, [1, 2], SETTINGS.model_copy(update={"samples": 4, "seed": seed})
        )
        for seed in (0, 0, 1)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]


def test_verification_without_prompts_is_refused() -> None:
    with pytest.raises(PromptError, match="no prompts to verify with"):
        verify_losslessness(_decoder(), [])
