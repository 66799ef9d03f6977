"""The number of threads is restored after decoding steps."""

import pytest
import torch
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from jakiro.utils.devices import num_threads


def test_the_number_is_set_and_restored_also_after_an_error() -> None:
    before = torch.get_num_threads()
    with num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with pytest.raises(KeyError), num_threads(before + 1):
        raise KeyError
    with num_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_the_caller_of_a_stream_keeps_its_own_number() -> None:
    before = torch.get_num_threads()
    decoder = SpeculativeDecoder(tiny_llama(), threads=before + 1)
    for _ in decoder.steps([1, 2, 3], max_new_tokens=4):
        assert torch.get_num_threads() == before
