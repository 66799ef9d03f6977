"""Models take their cache under the name that their version of transformers gives it."""

import warnings

import torch
from helpers.models import tiny_llama
from transformers import DynamicCache

from jakiro.target.cache_argument import cache_argument


def test_the_installed_transformers_does_not_warn_of_the_name() -> None:
    model, ids = tiny_llama(), torch.tensor([[1, 2, 3]])
    for module in (model, model.get_decoder()):
        cache = DynamicCache(config=model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(input_ids=ids, **{cache_argument(module): cache})
        assert cache.get_seq_length() == 3
