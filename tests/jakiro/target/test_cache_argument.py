"""Models take their cache under the name that their version of transformers gives it."""

import warnings

import pytest
import torch
from helpers.models import tiny_llama
from torch import Tensor, nn
from transformers import DynamicCache

from jakiro.target.cache_argument import cache_argument


class _Renamed(nn.Module):
    def forward(self, input_ids: Tensor, cache: object = None) -> Tensor:
        return input_ids


class _Former(nn.Module):
    def forward(self, input_ids: Tensor, past_key_values: object = None) -> Tensor:
        return input_ids


@pytest.mark.parametrize(("kind", "name"), [(_Renamed, "cache"), (_Former, "past_key_values")])
def test_the_name_is_that_of_the_forward_pass(kind: type[nn.Module], name: str) -> None:
    assert cache_argument(kind()) == name


def test_the_installed_transformers_does_not_warn_of_the_name() -> None:
    model, ids = tiny_llama(), torch.tensor([[1, 2, 3]])
    for module in (model, model.get_decoder()):
        cache = DynamicCache(config=model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(input_ids=ids, **{cache_argument(module): cache})
        assert cache.get_seq_length() == 3
