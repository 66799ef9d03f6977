"""Rotary embeddings, self-attention and the memory encoder, each by itself."""

import torch

from moa.attention import SelfAttention
from moa.memory import MemoryEncoder
from moa.rotary import Rotary


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
    attention = SelfAttention(hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=1e4)
    embeddings, positions = torch.randn(1, 6, 16), torch.arange(6)[None]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    seen = []
    attention(embeddings, positions, mask, lambda kv: seen.append(kv) or kv)
    for got, expected in zip(attention.kv(embeddings, positions), seen[0], strict=True):
        torch.testing.assert_close(got, expected)
