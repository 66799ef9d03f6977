"""Decoding with a static cache gives the tokens of `generate()`, captured or not."""

import pytest
import torch
from helpers.models import tiny_llama

from inference.profiling.gpu.graphs import captured, compiled
from inference.profiling.gpu.sections.autoregressive import StaticDecoding
from inference.profiling.runs import by_transformers

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]


def _tokens(device: str) -> list[list[int]]:
    model = tiny_llama(attn_implementation="sdpa").to(device)
    decoding = StaticDecoding(model, torch.tensor(PROMPTS, device=device), capacity=64)
    step = captured(decoding.step, torch.device(device))
    for _ in range(12):
        step()
    assert decoding.is_finite.all()
    return [tokens[:12] for tokens in decoding.new_tokens()]


def _expected() -> list[list[int]]:
    model = tiny_llama(attn_implementation="sdpa")
    return [by_transformers(model, prompt, 12)[len(prompt) :] for prompt in PROMPTS]


def test_tokens_are_those_of_generate() -> None:
    assert _tokens("cpu") == _expected()


@pytest.mark.gpu
def test_tokens_of_a_captured_step_are_those_of_generate() -> None:
    assert _tokens("cuda") == _expected()


@pytest.mark.gpu
def test_tokens_of_a_compiled_forward_pass_are_those_of_generate() -> None:
    cuda = torch.device("cuda")
    decoding = StaticDecoding(
        tiny_llama(attn_implementation="sdpa").to(cuda),
        torch.tensor(PROMPTS, device=cuda),
        capacity=64,
        compile_forward=lambda forward: compiled(forward, cuda),
    )
    for _ in range(12):
        decoding.step()
    assert decoding.new_tokens() == _expected()


def test_a_prompt_of_one_token_can_be_continued() -> None:
    decoding = StaticDecoding(tiny_llama(), torch.tensor([[3]]), capacity=64)
    decoding.step()
    assert len(decoding.new_tokens()[0]) == 1


def test_on_a_cpu_nothing_is_captured_or_compiled() -> None:
    cpu = torch.device("cpu")
    assert captured(list, cpu) is list
    assert compiled(list, cpu) is list
