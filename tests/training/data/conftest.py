"""A target that the tests of synthesis share."""

import pytest
from helpers.models import tiny_llama
from transformers import LlamaForCausalLM


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """Return a target that ends its turns often: every seventh token id is an end token."""
    model = tiny_llama(vocab=300, max_position_embeddings=512, initializer_range=0.1)
    model.generation_config.eos_token_id = list(range(0, 300, 7))
    return model
