"""Layer self-attention equals its equations, computed layer by layer in float64."""

import pytest
import torch
from torch import Tensor

from moa.memory import MemoryEncoder

WIDTH, NUM_HEADS, HEAD_DIM, MLP = 10, 2, 4, 7


def _rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * gain


def _rotated(head: Tensor, layer: int, base: float) -> Tensor:
    """Return a head's vector, rotated as complex numbers by angles that follow from the layer."""
    half = HEAD_DIM // 2
    numbers = torch.complex(head[:half], head[half:])
    angles = layer * base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = numbers * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat((turned.real, turned.imag))


def _by_hand(state: Tensor, weight: dict[str, Tensor], base: float) -> Tensor:
    """Return the mean over all layers of one token."""
    size = NUM_HEADS * HEAD_DIM
    packed = [
        weight["query_key_value.weight"] @ _rms(x, weight["attention_norm.weight"]) for x in state
    ]
    mixed = []
    for layer in range(len(state)):
        heads = []
        for head in range(NUM_HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            query = _rotated(packed[layer][:size][own], layer, base)
            keys = [
                _rotated(part[size : 2 * size][own], at, base) for at, part in enumerate(packed)
            ]
            scores = torch.stack([query @ key for key in keys]) / HEAD_DIM**0.5
            values = torch.stack([part[2 * size :][own] for part in packed])
            heads.append(scores.softmax(0) @ values)
        mixed.append(state[layer] + weight["output.weight"] @ torch.cat(heads))
    results = []
    for x in mixed:
        gate, up = (weight["gate_up.weight"] @ _rms(x, weight["mlp_norm.weight"])).chunk(2)
        results.append(x + weight["down.weight"] @ (gate * gate.sigmoid() * up))
    return torch.stack(results).mean(dim=0)


@pytest.mark.parametrize("base", [10_000.0, 50.0])
@torch.no_grad()
def test_every_layer_attends_to_every_other_layer_by_distance(base: float) -> None:
    torch.manual_seed(0)
    encoder = MemoryEncoder(5, WIDTH, 6, NUM_HEADS, HEAD_DIM, MLP, rope_theta=base).double()
    module = encoder.layer_attention
    assert module is not None
    for norm in (module.attention_norm, module.mlp_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    state = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    expected = torch.stack([_by_hand(token, module.state_dict(), base) for token in state])
    torch.testing.assert_close(module(state), expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_memory_is_the_projected_mean_over_layers() -> None:
    torch.manual_seed(0)
    encoder = MemoryEncoder(4, WIDTH, 6, NUM_HEADS, HEAD_DIM, MLP)
    state = torch.randn(2, 3, 4, WIDTH)
    assert encoder.layer_attention is not None
    for sequence, token in ((0, 1), (1, 2)):
        mean = encoder.layer_attention(state[sequence, token][None])[0]
        torch.testing.assert_close(encoder(state)[sequence, token], encoder.output(mean))
    swapped = state[:, :, [1, 0, 2, 3]]
    assert not torch.allclose(encoder(swapped), encoder(state), atol=1e-3)
