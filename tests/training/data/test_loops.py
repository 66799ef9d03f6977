"""Texts that repeat themselves are recognized and end early."""

import torch
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from training.data.loops import InLoop, ends_in_loop, repeats


def test_loops_are_recognised() -> None:
    assert not repeats(list(range(100)))
    assert not repeats([1, 2, 3] * 3)
    assert repeats([1, 2, 3, 4, 5, 6, 7, 8] * 4)


def test_a_text_ends_as_soon_as_it_loops() -> None:
    loop = torch.tensor([9, 9, 1, *[2, 3, 4, 5, 6, 7, 8, 1] * 4])
    lengths = range(1, len(loop) + 1)
    assert [length for length in lengths if ends_in_loop(loop[:length])] == [34, 35]


def test_loops_are_not_written_to_their_full_length() -> None:
    looping = tiny_llama(vocab=300)
    looping.generation_config.eos_token_id = None
    torch.nn.init.zeros_(looping.lm_head.weight)  # greedy decoding repeats token 0
    output = SpeculativeDecoder(looping).generate(
        [5, 6], temperature=0, max_new_tokens=100, stopping_criteria=[InLoop()]
    )
    assert output.new_token_ids == [0] * 11  # these contain the same 8-gram four times
