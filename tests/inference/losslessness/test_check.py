"""Verification passes a correct decoder, catches planted faults and raises no false alarms."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.losslessness import SHAPES, tiny_decoder
from helpers.models import tiny_llama
from torch import Tensor

from inference.decoder import GenerateOutput, SpeculativeDecoder
from inference.losslessness.check import check_greedy, verify_losslessness
from inference.losslessness.records import Check, Report, VerifySettings
from inference.losslessness.reference import NEAR_TIE_ULPS, Reference, Tokens, rounding
from inference.trees.shape import TreeShape

SETTINGS = VerifySettings(max_new_tokens=12, samples=50, sample_length=3)
PROMPTS = [[1, 2], [3, 1, 4]]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_correct_decoder_passes_every_check(shape: TreeShape) -> None:
    checks = list(verify_losslessness(tiny_decoder(shape), PROMPTS, SETTINGS))
    assert all(check.passed for check in checks)
    greedy, sequences, ranks, support = checks
    assert (greedy.prompts, greedy.tokens, greedy.differences) == (2, 24, ())
    assert (sequences.counted, ranks.counted, support.tokens) == (50, 100, 150)
    assert sequences.cells > 3
    assert sequences.drafted > 20


def test_decoding_that_ends_early_or_cuts_the_distribution_passes_too() -> None:
    decoder = tiny_decoder(eos_token_id=6)
    settings = VerifySettings(
        max_new_tokens=20,
        samples=50,
        sample_length=3,
        temperature=0.8,
        top_p=0.8,
        top_k=4,
    )
    checks = list(verify_losslessness(decoder, PROMPTS, settings))
    assert all(check.passed for check in checks)
    assert checks[3].tokens < 50 * 3  # some continuations ended early


@pytest.mark.slow
def test_settings_of_the_target_that_count_new_tokens_pass() -> None:
    decoder = tiny_decoder(eos_token_id=6)
    config = decoder.target.model.generation_config
    config.min_new_tokens = 2
    config.begin_suppress_tokens = [3]
    config.exponential_decay_length_penalty = (2, 1.5)
    config.stop_strings = ["x"]
    settings = VerifySettings(max_new_tokens=20, samples=200, sample_length=4)
    checks = list(verify_losslessness(decoder, PROMPTS, settings))
    assert all(check.passed for check in checks), checks
    assert checks[3].tokens < 200 * 4  # some continuations ended


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
    decoder = tiny_decoder(kind=_WrongAtFive)
    check = check_greedy(decoder, [[1, 2], [3]], 8)
    assert not check.passed
    first, second = check.differences
    assert (first.prompt, second.prompt, check.tokens) == (1, 2, 8)
    assert first.position == second.position == 5
    assert first.decoder_token == (first.target_token + 1) % 7
    assert first.gap > 0 == first.rounding
    assert "prompt 1, new token 5: target" in str(first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_excuses_a_failure_only_in_half_precision(dtype: str) -> None:
    check = Check(name="greedy equality", passed=False, line="")
    report = Report(target="any", dtype=dtype, settings=SETTINGS, checks=(check,))
    assert report.summary.startswith("0 of 1 checks passed")
    assert ("rounding" in report.summary) == (dtype == "bfloat16")


def test_a_continuation_that_ends_too_early_differs() -> None:
    check = check_greedy(tiny_decoder(kind=_EndingEarly), [[1, 2]], 8)
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

    decoder = tiny_decoder(kind=_WrongAtFive)
    decoder.target.model.to(torch.bfloat16)
    decoder.drafter = None
    greedy = Reference(decoder.target.model, [1, 2]).greedy(8)
    top = 20.0 + rounding(torch.bfloat16, [20.0]) / nearness
    monkeypatch.setattr(Reference, "greedy_scores", scores)
    check = check_greedy(decoder, [[1, 2]], 8)
    assert check.passed == passes
    assert check.differences[0].is_near_tie == passes
    assert ("0 differences, 1 near-tie;" in str(check)) == passes
    words = "equal to those of generate(): 0, to those without drafts: 1 (rounding may differ)"
    assert str(check).endswith(words)


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
