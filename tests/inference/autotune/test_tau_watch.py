"""A tau far below that of the drafter's evaluation causes a single warning."""

import pytest
from helpers.models import tiny_drafter, tiny_llama

from inference import SpeculativeDecoder
from inference.trees.shape import Trees
from jakiro.target.adapter import TargetAdapter


def _decoder(tau: float, temperature: float = 0.0, tree: Trees = "fixed") -> SpeculativeDecoder:
    model = tiny_llama(vocab=61)
    drafter = tiny_drafter(TargetAdapter(model))  # untrained: its drafts are hardly ever accepted
    figures = {"temperature": temperature, "tau": tau}
    drafter.config.record = {"evaluation": {"decoding": [figures]}}
    return SpeculativeDecoder(model, drafter, tree=tree)


def _decode(decoder: SpeculativeDecoder, num_steps: int) -> None:
    """Decode for `num_steps` steps, provided that all drafts are rejected."""
    prompts = [[1, 2, 3 + number] for number in range(num_steps // 10)]
    decoder.generate_batch(prompts, max_new_tokens=11, temperature=0.0, seed=0)


def test_a_tau_far_below_the_evaluation_causes_one_warning_with_both_figures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = _decoder(tau=3.21)
    _decode(decoder, 200)
    assert not caplog.records  # too few decoding steps
    for _ in range(2):
        _decode(decoder, 400)
    (record,) = caplog.records
    assert "expected 3.21" in record.getMessage()
    assert "chat template" in record.getMessage()


def test_a_temperature_that_was_not_evaluated_causes_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _decode(_decoder(tau=3.0, temperature=0.5), 500)
    assert not caplog.records
