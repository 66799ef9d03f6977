"""Attention equals that of transformers up to rounding, also in parts."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from inference import SpeculativeDecoder
from jakiro.target import adapter, attention
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention import (
    attend_in_parts,
    grouped_attention,
    kernel_of_cpu,
    kernel_on,
    num_parts,
    without_cudnn,
)
from jakiro.target.independent_rows import batch_invariant_attention
from jakiro.target.step import chain_step

BF16, CPU, GPU = torch.bfloat16, torch.device("cpu"), torch.device("cuda")


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


def _long_inputs(queries: int, slots: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, views of longer keys and values, and a mask."""
    generator = torch.Generator().manual_seed(queries * slots)
    query = torch.randn(1, 2, queries, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 2, slots + 64, 16, generator=generator).to(dtype)
    places = torch.arange(slots)
    positions = slots - queries + torch.arange(queries)[:, None]
    is_seen = places <= positions
    if kind == "sliding":
        is_seen &= positions - places < 40
    if kind == "short":
        is_seen = (places < 9).expand(queries, -1)
    mask = torch.where(is_seen, 0.0, torch.finfo(dtype).min / 2).to(dtype)
    return query, key[:, :, :slots], value[:, :, :slots], mask[None, None]


@pytest.mark.parametrize(("queries", "parts"), [(1, 6), (61, 2)])
@pytest.mark.parametrize("kind", ["full", "sliding", "short"])
def test_parts_are_weighted_as_one_whole(kind: str, queries: int, parts: int) -> None:
    query, key, value, mask = _long_inputs(queries, 6 * 64, kind, torch.float32)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    got = attend_in_parts(query, key, value, mask, 0.3, parts, kernel_of_cpu)
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, atol=2e-6)


def test_parts_have_equal_sizes_and_keep_all_processors_busy() -> None:
    # 61 queries of an 8B target on 132 processors are 32 blocks.
    for num_blocks, num_keys, expected in ((32, 8192, 4), (8, 512, 1), (32, 64 * 129, 3)):
        assert num_parts(num_blocks, num_keys, num_processors=132) == expected


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_weights(*args: Any) -> tuple[Tensor, Tensor]:
        attended, log_sums = kernel_of_cpu(*args)
        return attended, torch.zeros_like(log_sums)

    def missing(*args: Any) -> tuple[Tensor, Tensor]:
        raise AttributeError("there is no such operator")

    for kernel, is_used in ((kernel_of_cpu, True), (without_weights, False), (missing, False)):
        kernel_on.cache_clear()
        monkeypatch.setattr(attention, "kernel_of_cpu", kernel)
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
        monkeypatch.setattr(attention, "attend", in_parts)
        got = features()
    assert num_calls > 0
    assert torch.allclose(got, expected, atol=1e-5)


def _uses_cudnn() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_is_off_until_the_last_block_has_ended() -> None:
    before = _uses_cudnn()
    first, second = ExitStack(), ExitStack()  # as of two threads
    first.enter_context(without_cudnn(GPU))
    second.enter_context(without_cudnn(GPU))
    assert not _uses_cudnn()
    first.close()
    assert not _uses_cudnn()
    second.close()
    assert _uses_cudnn() == before


class _Attention(TorchFunctionMode):
    """Notes for each call of attention whether cuDNN may be used."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        if func is scaled_dot_product_attention:
            self.enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return func(*args, **(kwargs or {}))


def test_decoding_never_uses_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_a_gpu(_: torch.device) -> Any:
        return attention.without_cudnn(torch.device("cuda"))

    monkeypatch.setattr(adapter, "without_cudnn", as_on_a_gpu)
    monkeypatch.setattr("inference.drafters.trained.drafter.without_cudnn", as_on_a_gpu)
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    with _Attention() as calls:
        decoder.generate([1, 2, 3], temperature=0, max_new_tokens=6)
    assert len(calls.enabled) > 10
    assert not any(calls.enabled)
