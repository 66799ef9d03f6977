"""Keys and values that are computed again from hidden states are those that the target cached."""

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn

from moa.layers import Rotary
from moa.target_kv import TargetKV, with_rotated_keys

LAYERS = (2, 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_computed_keys_and_values_are_the_cached_ones(seed: int) -> None:
    model = tiny_llama(num_hidden_layers=3, seed=seed)
    with torch.no_grad():
        for layer in model.model.layers:
            nn.init.uniform_(layer.input_layernorm.weight, 0.5, 1.5)
        tokens = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(seed))
        output = model(tokens, output_hidden_states=True)
    layers = [model.model.layers[index] for index in LAYERS]
    eps = model.config.rms_norm_eps
    copy = TargetKV(len(LAYERS), 32, 16, eps, Rotary(8, base=10_000.0))
    with torch.no_grad():
        copy.norm.copy_(torch.stack([layer.input_layernorm.weight for layer in layers]))
        projections = [(layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in layers]
        stacked = [torch.cat([part.weight for part in pair]) for pair in projections]
        copy.weight.copy_(torch.stack(stacked))
        inputs = torch.stack([output.hidden_states[index][0] for index in LAYERS], dim=1)
        got = copy.rotated(copy(inputs), torch.arange(9))
    for row, index in enumerate(LAYERS):
        cached = output.past_key_values.layers[index]
        expected = [part[0].transpose(0, 1).flatten(1) for part in (cached.keys, cached.values)]
        torch.testing.assert_close(got[:, row], torch.cat(expected, -1), atol=1e-5, rtol=1e-5)


def test_a_rotation_is_undone_at_negated_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2, 5, 3, 32, generator=generator)  # two heads of width 8
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 40, 41, 300]])
    frequencies = (1.0, 0.5, 0.1, 0.01)
    turned = with_rotated_keys(state, positions, Rotary(8, 1.0, frequencies, 2.0))
    assert torch.equal(turned[..., 16:], state[..., 16:])
    assert not torch.allclose(turned[..., :16], state[..., :16])
    back = with_rotated_keys(turned, -positions, Rotary(8, 1.0, frequencies, 0.5))
    torch.testing.assert_close(back, state, atol=1e-5, rtol=1e-5)
