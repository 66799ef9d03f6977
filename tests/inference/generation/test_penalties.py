"""Penalties of tokens that a text already contains."""

import pytest
import torch
from helpers.models import tiny_llama
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from inference.generation.penalties import TokenPenalties


def test_only_new_tokens_are_penalized() -> None:
    penalties = TokenPenalties(2, frequency=0.5, presence=0.25)
    ids = torch.tensor([[1, 3, 1, 1, 2], [0, 0, 3, 0, 3]])
    scores = torch.zeros(2, 4)
    found = penalties(ids, scores)
    expected = [[0.0, -1.25, -0.75, 0.0], [-0.75, 0.0, 0.0, -1.25]]
    assert torch.equal(found, torch.tensor(expected))
    assert torch.equal(scores, torch.zeros(2, 4))


def test_without_new_tokens_nothing_changes() -> None:
    scores = torch.randn(1, 4)
    found = TokenPenalties(3, frequency=2.0)(torch.tensor([[1, 1, 1]]), scores)
    assert torch.equal(found, scores)


@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 2.0), (-0.5, 0.7)])
def test_greedy_text_is_that_of_transformers(frequency: float, presence: float) -> None:
    model = tiny_llama()
    prompt = [1, 2, 3, 1, 2]
    processors = LogitsProcessorList([TokenPenalties(len(prompt), frequency, presence)])
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=30,
        do_sample=False,
        logits_processor=processors,
        pad_token_id=0,
    )
    decoder = SpeculativeDecoder(model, LookupDrafter(), tree="fixed")
    found = decoder.generate(prompt, max_new_tokens=30, temperature=0, logits_processor=processors)
    assert found.new_token_ids == output[0, len(prompt) :].tolist()
