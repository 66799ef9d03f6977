"""Rotary embeddings for long contexts have the parameters of transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jakiro.utils.rope import RopeSettings, rope_frequencies

KINDS = {
    "linear": RopeSettings(kind="linear", factor=2.0),
    "llama3": RopeSettings(kind="llama3", factor=8.0, original_max_position_embeddings=64),
    "yarn": RopeSettings(kind="yarn", factor=4.0, original_max_position_embeddings=64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_a_target_with_the_same_parameters(kind: str) -> None:
    rope = KINDS[kind]
    positions = int((rope.original_max_position_embeddings or 64) * rope.factor)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=positions,
        rope_parameters=rope.parameters(5e5),
    )
    own = LlamaRotaryEmbedding(config)
    with torch.device("meta"):  # where drafters are built whose weights are read later
        frequencies, scale = rope_frequencies(rope, 5e5, 32)
    assert frequencies is not None
    torch.testing.assert_close(torch.tensor(frequencies), own.inv_freq, atol=0, rtol=0)
    assert scale == pytest.approx(own.attention_scaling)


def test_without_a_change_the_base_alone_counts() -> None:
    assert rope_frequencies(RopeSettings(), 1e4, 8) == (None, 1.0)
    assert RopeSettings().parameters(1e4) == {"rope_type": "default", "rope_theta": 1e4}
