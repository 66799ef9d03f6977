"""Rotary embeddings, self-attention and the memory encoder, each by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moa import attention
from moa.attention import MOST_GROUPED, SelfAttention
from moa.layers import Rotary
from moa.memory import MemoryEncoder


def test_rotary_scores_depend_only_on_the_distance() -> None:
    torch.manual_seed(0)
    rotary, query, key = Rotary(8, 10_000.0), torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(first: int, second: int) -> torch.Tensor:
        return (
            rotary(query, torch.tensor([[first]])) * rotary(key, torch.tensor([[second]]))
        ).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101))
    assert not torch.isclose(score(3, 1), score(3, 2))


@torch.no_grad()
def test_memory_of_a_token_ignores_other_tokens_but_uses_every_layer() -> None:
    torch.manual_seed(0)
    encoder = MemoryEncoder(
        num_layers=3, width=12, hidden=10, num_heads=2, head_dim=4, mlp_width=16, common_width=6
    )
    state = torch.randn(1, 5, 3, 12)
    memory = encoder(state)
    assert memory.shape == (1, 5, 10)
    torch.testing.assert_close(encoder(state[:, 2:3])[0, 0], memory[0, 2])
    for layer in range(3):
        changed = state.clone()
        changed[0, 2, layer] *= -1.0
        assert not torch.allclose(encoder(changed)[0, 2], memory[0, 2])


@torch.no_grad()
def test_without_layer_attention_one_state_is_memory_and_several_are_concatenated() -> None:
    sizes = {"width": 10, "hidden": 10, "num_heads": 2, "head_dim": 4, "mlp_width": 16}
    state = torch.randn(1, 5, 2, 10)
    single = MemoryEncoder(num_layers=1, **sizes, layer_attention=False)
    assert sum(part.numel() for part in single.parameters()) == 0
    torch.testing.assert_close(single(state[:, :, :1]), state[:, :, 0])
    both = MemoryEncoder(num_layers=2, **sizes, layer_attention=False)
    expected = both.output(torch.cat((state[:, :, 0], state[:, :, 1]), dim=-1))
    torch.testing.assert_close(both(state), expected)


@torch.no_grad()
def test_keys_and_values_computed_ahead_equal_those_of_a_forward() -> None:
    torch.manual_seed(0)
    own = SelfAttention(hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=1e4)
    embeddings, positions = torch.randn(1, 6, 16), torch.arange(6)[None]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    seen = []
    own(embeddings, positions, mask, lambda kv: seen.append(kv) or kv)
    for got, expected in zip(own.kv(embeddings, positions), seen[0], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, MOST_GROUPED + 1])
def test_heads_that_share_keys_mix_the_same_values_together(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    queries = torch.randn(2, 6, count, 8, dtype=dtype)
    keys, values = torch.randn(2, 2, 3, 40, 8, dtype=dtype)
    mask = torch.rand(2, 1, count, 40) > 0.3
    heads = []

    def noted(first: Tensor, *args: Any, **options: Any) -> Tensor:
        heads.append(first.shape[1])
        return scaled_dot_product_attention(first, *args, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    mixed = attention.attend_masked(queries, attention.KV(keys, values), mask)
    expected = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
    torch.testing.assert_close(mixed, expected)
    assert heads == [6 if dtype == torch.float32 or count > MOST_GROUPED else 3]
