"""Vectors with 8 bits for each value, for data that affects drafts only: embeddings and memory.

Each group of values has its own scale in float16. The target itself is never quantized.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor
from torch.nn.functional import pad

GROUP = 64  # number of values with the same scale
_LEVELS = 127  # largest magnitude of a quantized value


class Int8Rows(NamedTuple):
    """Quantized vectors, whose length is rounded up to whole groups."""

    values: Int8[Tensor, "rows padded"]
    scales: Float16[Tensor, "rows groups"]


def num_groups(width: int) -> int:
    """Return the number of groups of vectors with `width` values."""
    return -(-width // GROUP)


def quantized_rows(rows: Float[Tensor, "rows width"]) -> Int8Rows:
    """Return quantized vectors.

    Values that are not finite become 0 or the largest value that a group can have.
    """
    padding = -rows.shape[1] % GROUP
    groups = pad(rows.float().nan_to_num(), (0, padding)).unflatten(1, (-1, GROUP))
    limit = torch.finfo(torch.float16).max
    scales = (groups.abs().amax(dim=2) / _LEVELS).clamp(max=limit).half()
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    values = (groups / divisors).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return Int8Rows(values.flatten(1), scales)


def restored_rows(quantized: Int8Rows, width: int) -> Float[Tensor, "rows width"]:
    """Return vectors in float32."""
    groups = quantized.values.unflatten(1, (-1, GROUP)).float()
    return (groups * quantized.scales.float()[:, :, None]).flatten(1)[:, :width]
