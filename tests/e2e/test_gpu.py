"""Decoding on a GPU gives the tokens of the target's own `generate`; run with `-m gpu`."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference import SpeculativeDecoder
from jakiro.target.adapter import TargetAdapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_on_a_gpu_are_those_of_generate(batch: int) -> None:
    model = tiny_llama().cuda()
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    prompts = [[1, 2, 3 + index] for index in range(batch)]
    outputs = decoder.generate_batch(prompts, max_new_tokens=24, temperature=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        expected = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert output.new_token_ids == expected[0, len(prompt) :].tolist()


def test_decoding_in_bfloat16_is_finite_and_repeatable_on_a_gpu() -> None:
    model = tiny_llama().to("cuda", torch.bfloat16)
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    first, second = (
        decoder.generate([1, 2, 3], max_new_tokens=24, temperature=1.0, seed=5) for _ in range(2)
    )
    assert first.new_token_ids == second.new_token_ids
