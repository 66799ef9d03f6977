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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_steps_are_recorded_and_give_the_same_tokens(temperature: float) -> None:
    model = tiny_llama().cuda()
    drafter = tiny_drafter(TargetAdapter(model))
    usual, captured = (
        SpeculativeDecoder(model, drafter, tree="fixed", captured=own) for own in (False, True)
    )
    for prompt in ([1, 2, 3], [4, 5]):  # the second request takes over the recorded steps
        request = {"max_new_tokens": 40, "temperature": temperature, "seed": 1}
        expected = usual.generate(prompt, **request)
        assert captured.generate(prompt, **request).new_token_ids == expected.new_token_ids
    pool = captured._pool
    assert pool is not None
    (unused,) = pool._unused
    assert unused.recorded
    assert all(step._run._graph is not None for step in unused.recorded.values())


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # advice of the compiler
def test_compiled_steps_on_a_gpu_give_the_same_tokens() -> None:
    model = tiny_llama().cuda()
    drafter = tiny_drafter(TargetAdapter(model))
    request = {"max_new_tokens": 40, "temperature": 0.0}
    expected = SpeculativeDecoder(model, drafter, tree="fixed").generate([1, 2, 3], **request)
    compiled = SpeculativeDecoder(model, drafter, tree="fixed", compiled=True)
    assert compiled.generate([1, 2, 3], **request).new_token_ids == expected.new_token_ids
