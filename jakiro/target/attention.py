"""Attention of a target for the few queries of a step.

transformers repeats keys and values for every query head, unless there is only one query.
`grouped_attention` turns the query heads that share keys into queries of a single head, so that
nothing is repeated.

Attention kernels process all keys of a block of queries one after the other, so with the few
queries of a step, most of a GPU would be idle. If a single sequence has many keys, each part of the
keys therefore takes the place of a sequence of a batch, and the parts are weighted by the sums of
their exponentiated scores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from jakiro.utils.logs import get_logger

MOST_QUERIES = 64  # with more queries than this, repeated keys cost little in comparison
BLOCK = 64  # number of queries that a kernel processes together, and divisor of a part's size
SMALLEST_PART = 512  # number of keys, below which another part would not save time

_logger = get_logger(__name__)

Queries = Float[Tensor, "batch heads queries dim"]
Keys = Float[Tensor, "batch kv_heads slots dim"]
Values = Float[Tensor, "batch kv_heads slots value_dim"]
Mask = Float[Tensor, "batch 1 queries slots"]
Attended = Float[Tensor, "batch queries heads value_dim"]
# Function from queries, keys, values, mask and scale to the attended values and the logarithm of
# the sum of exponentiated scores.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


def grouped_attention(
    module: nn.Module,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Attended, None]:
    """Return what `sdpa` attention of transformers returns, without repeated keys and values.

    Calls without a mask that all heads share, without key heads that query heads share, with
    options such as dropout, or with many queries are passed on to transformers.
    """
    groups, is_cuda = query.shape[1] // key.shape[1], query.is_cuda
    is_special = options.get("dropout") or options.get("softcap") or options.get("cache")
    is_special = is_special or options.get("position_bias") is not None
    # A mask for every group must not be larger than the keys and values that it saves.
    most = MOST_QUERIES if is_cuda else max(MOST_QUERIES, 2 * key.shape[1] * key.shape[3])
    is_special = is_special or query.shape[2] > most
    if groups == 1 and not is_cuda:  # a GPU may process the keys in several parts
        is_special = True
    is_shared = attention_mask is not None and attention_mask.dim() == 4
    if is_special or attention_mask is None or not is_shared or attention_mask.shape[1] != 1:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended, None
    rows, mask = group_heads(query, key.shape[1]), _repeat(attention_mask, groups)
    return ungroup_heads(attend(rows, key, value, mask, scaling), query), None


def _repeat(mask: Mask, groups: int) -> Float[Tensor, "batch 1 rows slots"]:
    """Return the mask of queries that are grouped, which all layers of a step share."""
    if groups == 1:
        return mask
    if torch.compiler.is_compiling():
        return mask.repeat(1, 1, groups, 1)
    by_groups: dict[int, Tensor] = getattr(mask, "_by_groups", {})
    if groups not in by_groups:
        by_groups[groups] = mask.repeat(1, 1, groups, 1)
        mask._by_groups = by_groups  # type: ignore[attr-defined]
    return by_groups[groups]


def group_heads(query: Tensor, num_kv_heads: int) -> Float[Tensor, "batch kv_heads rows dim"]:
    """Return the queries of all heads that share keys, one head after the other, as one head."""
    return query.reshape(query.shape[0], num_kv_heads, -1, query.shape[3])


def ungroup_heads(attended: Tensor, query: Tensor) -> Attended:
    """Return attended values of grouped queries in the layout of transformers."""
    batch, heads, count, _ = query.shape
    return attended.reshape(batch, heads, count, -1).transpose(1, 2).contiguous()


def register(name: str, function: Callable[..., Any]) -> str:
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)  # the adapter passes masks of its own
    return name


GROUPED = register("jakiro_grouped", grouped_attention)


def attend(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch heads slots dim"],
    value: Float[Tensor, "batch heads slots value_dim"],
    mask: Float[Tensor, "batch 1 queries slots"],
    scale: float | None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return attention, computed in parts if this is faster on the device.

    Args:
        mask: mask that is added to the scores; hidden slots have a finite value.
    """
    is_simple = query.is_cuda and len(query) == 1 and not torch.compiler.is_compiling()
    if is_simple and query.shape[3] == value.shape[3]:
        num_blocks = query.shape[1] * -(-query.shape[2] // BLOCK)
        parts = num_parts(num_blocks, key.shape[2], _num_processors(query.device))
        kernel = kernel_on(query.device, query.dtype) if parts > 1 else None
        if kernel is not None:
            return attend_in_parts(query, key, value, mask, scale, parts, kernel)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def num_parts(num_blocks: int, num_keys: int, num_processors: int) -> int:
    """Return the number of parts of equal size that keep all processors of a GPU busy."""
    most = min(num_processors // num_blocks, num_keys // SMALLEST_PART)
    return max((n for n in range(1, most + 1) if num_keys % (n * BLOCK) == 0), default=1)


def attend_in_parts(
    query: Float[Tensor, "1 heads queries dim"],
    key: Float[Tensor, "1 heads slots dim"],
    value: Float[Tensor, "1 heads slots dim"],
    mask: Float[Tensor, "1 1 queries slots"],
    scale: float | None,
    parts: int,
    kernel: Kernel,
) -> Float[Tensor, "1 heads queries dim"]:
    """Return attention whose keys are processed in several parts; no tensor is copied for this."""
    size = key.shape[2] // parts
    keys, values = (
        tensor[0].unflatten(1, (parts, size)).transpose(0, 1)  # [parts, heads, size, dim]
        for tensor in (key, value)
    )
    masks = mask[0, 0].unflatten(1, (parts, size)).transpose(0, 1)[:, None]
    masks = masks.expand(-1, query.shape[1], -1, -1)
    attended, log_sums = kernel(query.expand(parts, -1, -1, -1), keys, values, masks, scale)
    # Where a part has only hidden slots, its values are finite, and its weight is 0.
    weights = log_sums[:, :, : query.shape[2]].softmax(dim=0)
    merged = (attended * weights[..., None]).sum(dim=0, keepdim=True)
    return merged.to(value.dtype)


@lru_cache(maxsize=16)
def kernel_on(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Return the kernel of a device, after a test of it; None if it does not work."""
    kernel = _kernel_of_gpu if device.type == "cuda" else kernel_of_cpu
    try:
        difference = _difference(kernel, device, dtype)
        if difference < 0.05:
            return kernel
        problem = f"wrong by {difference}"
    except (RuntimeError, TypeError, AttributeError) as error:
        problem = str(error)
    _logger.warning("attention to many keys is not computed in parts: %s", problem)
    return None


def kernel_of_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended, log_sums = flash(query, key, value, attn_mask=mask, scale=scale)
    return attended, log_sums


def _kernel_of_gpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    attended, log_sums, *_ = efficient(query, key, value, mask, True, scale=scale)
    return attended, log_sums


@lru_cache(maxsize=16)
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _difference(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of attention in parts, one of which has only hidden slots."""
    generator = torch.Generator(device).manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": dtype, "generator": generator}
    query = torch.randn(1, 2, 5, 64, **like)
    key, value = torch.randn(2, 1, 2, 4 * BLOCK, 64, **like)
    mask = torch.zeros(1, 1, 5, 4 * BLOCK, device=device, dtype=dtype)
    mask[..., 2 * BLOCK + 7 :] = torch.finfo(dtype).min / 2
    got = attend_in_parts(query, key, value, mask, None, 4, kernel)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return float((got - expected).abs().max())


class _CudnnSwitch:
    """Counts the threads of the process that need attention without cuDNN."""

    lock = Lock()
    num_users = 0
    was_enabled = True


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Compute attention without cuDNN, which takes tens of milliseconds to plan for a new shape.

    The number of keys changes all the time while texts grow. The setting belongs to the process, so
    it is restored when no thread is inside such a block any more.
    """
    if device.type != "cuda":
        yield
        return
    switch = _CudnnSwitch
    with switch.lock:
        if switch.num_users == 0:
            switch.was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        switch.num_users += 1
    try:
        yield
    finally:
        with switch.lock:
            switch.num_users -= 1
            if switch.num_users == 0:
                torch.backends.cuda.enable_cudnn_sdp(switch.was_enabled)
