"""Attention equals that of transformers up to rounding; one form is batch-invariant."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jakiro.target import adapter, attention
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention import (
    batch_invariant_attention,
    grouped_attention,
)
from jakiro.target.step import chain_step

BF16 = torch.bfloat16


class _Layer(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def _inputs(groups: int = 3, queries: int = 7, slots: int = 64, dtype: Any = BF16) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((2, 2 * groups, queries, 16), (2, 2, slots, 16), (2, 2, slots, 16))
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in shapes)
    hidden = torch.rand(2, 1, queries, slots) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return [query, key, value, mask]


@pytest.mark.parametrize("queries", [1, 7, 100])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("attend", [grouped_attention, batch_invariant_attention])
def test_attention_is_that_of_transformers(attend: Any, groups: int, queries: int) -> None:
    inputs, layer = _inputs(groups, queries, dtype=torch.float32), _Layer(groups)
    expected, _ = sdpa_attention_forward(layer, *inputs, scaling=0.3)
    got, weights = attend(layer, *inputs, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_all_layers_of_a_step_share_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetAdapter(tiny_llama())
    target.fuse()
    seen: list[torch.Tensor] = []
    original = attention.attend

    def noted(query: Any, key: Any, value: Any, mask: torch.Tensor, scale: Any) -> torch.Tensor:
        seen.append(mask)
        return original(query, key, value, mask, scale)

    monkeypatch.setattr(attention, "attend", noted)
    monkeypatch.delattr(adapter, "positions_in_slots")  # which only layers with a window need
    target.forward(chain_step(torch.tensor([[1, 2, 3]]), start=0), target.new_cache(1, 8))
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert len(seen) == target.config.num_hidden_layers > 1
    assert {mask.data_ptr() for mask in seen} == {seen[0].data_ptr()}
    assert seen[0].shape[2] == 3 * groups > 3


def test_options_that_grouping_does_not_know_go_to_transformers() -> None:
    query, key, value, mask = _inputs()
    each_head = mask.repeat(1, 6, 1, 1)
    expected, _ = sdpa_attention_forward(_Layer(3), query, key, value, each_head)
    got, _ = grouped_attention(_Layer(3), query, key, value, each_head)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(_Layer(3), query, key, value, mask, softcap=5.0)


def test_neither_other_queries_nor_hidden_slots_nor_the_order_of_keys_change_a_bit() -> None:
    query, key, value, mask = _inputs()
    expected, _ = batch_invariant_attention(_Layer(3), query, key, value, mask)
    alone, _ = batch_invariant_attention(
        _Layer(3), query[1:, :, 3:4], key[1:], value[1:], mask[1:, :, 3:4]
    )
    assert torch.equal(alone[:, 0], expected[1:, 3])
    order = torch.randperm(64)
    moved, _ = batch_invariant_attention(
        _Layer(3), query, key[:, :, order], value[:, :, order], mask[..., order]
    )
    assert torch.equal(moved, expected)
    wider = torch.cat((mask, mask.new_full((2, 1, 7, 64), torch.finfo(BF16).min)), dim=3)
    more_keys, more_values = (torch.cat((part, 9 * part), dim=2) for part in (key, value))
    padded, _ = batch_invariant_attention(_Layer(3), query, more_keys, more_values, wider)
    assert torch.equal(padded, expected)


def test_a_soft_cap_bounds_the_scores() -> None:
    query, key, value, mask = _inputs(dtype=torch.float32)
    got, _ = batch_invariant_attention(_Layer(3), 9 * query, key, value, mask, softcap=2.0)
    keys, values = (part.repeat_interleave(3, dim=1) for part in (key, value))
    scores = 2.0 * torch.tanh(9 * query @ keys.transpose(2, 3) / 4 / 2.0) + mask
    torch.testing.assert_close(got, (scores.softmax(-1) @ values).transpose(1, 2))
