"""Attention of a single sequence to many keys, which a GPU processes in several parts at once.

A step has few queries, so attention kernels, which process all keys of a block of queries one after
the other, would leave most of a GPU idle. Here, each part of the keys takes the place of a sequence
of a batch, and the parts are weighted by the sums of their exponentiated scores.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jakiro.utils.logs import get_logger

BLOCK = 64  # number of queries that a kernel processes together, and divisor of a part's size
SMALLEST_PART = 512  # number of keys, below which another part would not save time

_logger = get_logger(__name__)

# Function from queries, keys, values, mask and scale to the attended values and the logarithm of
# the sum of exponentiated scores.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


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
    """Return the number of parts of equal size that keep all processors of a GPU busy.

    Args:
        num_processors: number of blocks that the GPU processes at the same time.
    """
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
    """Return attention whose keys are processed in several parts; no tensor is copied for this.

    Args:
        parts: number of parts, a divisor of the number of slots.
    """
    size = key.shape[2] // parts
    keys, values = (
        own[0].unflatten(1, (parts, size)).transpose(0, 1)  # [parts, heads, size, dim]
        for own in (key, value)
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
    except (RuntimeError, TypeError, AttributeError) as error:
        _logger.warning("attention to many keys is not computed in parts: %s", error)
        return None
    if not difference < 0.05:
        _logger.warning("attention to many keys is not computed in parts: wrong by %s", difference)
        return None
    return kernel


def kernel_of_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attended values and the logarithms of the sums of exponentiated scores."""
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
