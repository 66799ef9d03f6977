"""Attention in parts is attention to all keys at once, up to rounding."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jakiro.target import split_attention
from jakiro.target.adapter import TargetAdapter
from jakiro.target.split_attention import (
    attend_in_parts,
    kernel_of_cpu,
    kernel_on,
    num_parts,
)
from jakiro.target.step import chain_step

CPU = torch.device("cpu")


def _inputs(queries: int, slots: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, views of longer keys and values, and a mask."""
    generator = torch.Generator().manual_seed(queries * slots)
    query = torch.randn(1, 2, queries, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 2, slots + 64, 16, generator=generator).to(dtype)
    positions = torch.arange(slots)
    own = slots - queries + torch.arange(queries)[:, None]
    is_seen = positions <= own
    if kind == "sliding":
        is_seen &= own - positions < 40
    if kind == "short":
        is_seen = (positions < 9).expand(queries, -1)
    mask = torch.where(is_seen, 0.0, torch.finfo(dtype).min / 2).to(dtype)
    return query, key[:, :, :slots], value[:, :, :slots], mask[None, None]


@pytest.mark.parametrize(("queries", "parts"), [(1, 6), (8, 3), (61, 2)])
@pytest.mark.parametrize("kind", ["full", "sliding", "short"])
def test_parts_are_weighted_as_one_whole(kind: str, queries: int, parts: int) -> None:
    inputs = _inputs(queries, 6 * 64, kind, torch.float32)
    query, key, value, mask = inputs
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    found = attend_in_parts(*inputs, 0.3, parts, kernel_of_cpu)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=2e-6)


def test_half_precision_is_as_exact_as_attention_to_all_keys_at_once() -> None:
    inputs = _inputs(8, 6 * 64, "full", torch.bfloat16)
    query, key, value, mask = inputs
    exact = scaled_dot_product_attention(
        *(own.double() for own in (query, key, value)), attn_mask=mask.double()
    )
    whole = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    found = attend_in_parts(*inputs, None, 3, kernel_of_cpu)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 2 * (whole - exact).abs().max()


@pytest.mark.parametrize(
    ("num_blocks", "num_keys", "expected"),
    [
        (32, 8192, 4),  # 61 queries of an 8B target on 132 processors
        (8, 512, 1),
        (32, 64 * 129, 3),
    ],
)
def test_parts_have_equal_sizes_and_keep_all_processors_busy(
    num_blocks: int, num_keys: int, expected: int
) -> None:
    assert num_parts(num_blocks, num_keys, num_processors=132) == expected


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_weights(*args: Any) -> tuple[Tensor, Tensor]:
        attended, log_sums = kernel_of_cpu(*args)
        return attended, torch.zeros_like(log_sums)

    def missing(*args: Any) -> tuple[Tensor, Tensor]:
        raise AttributeError("there is no such operator")

    for kernel, is_used in ((kernel_of_cpu, True), (without_weights, False), (missing, False)):
        kernel_on.cache_clear()
        monkeypatch.setattr(split_attention, "kernel_of_cpu", kernel)
        assert (kernel_on(CPU, torch.float32) is not None) == is_used
    kernel_on.cache_clear()


def test_a_target_reads_a_tree_in_parts_with_the_same_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TargetAdapter(tiny_llama())
    target.fuse()
    num_calls = 0

    def in_parts(*args: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return attend_in_parts(*args, args[1].shape[2] // 64, kernel_of_cpu)

    def features() -> Tensor:
        cache = target.new_cache(1, 250)
        target.forward(chain_step(torch.arange(180)[None] % 7, 0), cache)
        return target.forward(chain_step(torch.arange(5)[None], 180), cache).features

    with torch.inference_mode():
        expected = features()
        monkeypatch.setattr("jakiro.target.attention.attend", in_parts)
        found = features()
    assert num_calls > 0
    assert torch.allclose(found, expected, atol=1e-5)
