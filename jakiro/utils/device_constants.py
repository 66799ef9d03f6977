"""Short constant tensors, which are copied to a device once and used in many decoding steps."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

MOST_CONSTANTS = 512  # the one that was used least recently is freed first


def indices_on(device: torch.device, indices: Sequence[int]) -> Int[Tensor, " n"]:
    """Return indices on a device; the tensor must not be changed."""
    return constants_on(device, tuple(indices), torch.long)


@lru_cache(maxsize=MOST_CONSTANTS)
def constants_on(
    device: torch.device, values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """Return numbers on a device, with shape [n]; the tensor must not be changed."""
    with torch.inference_mode(False):  # the tensor may be used outside this mode
        return torch.tensor(values, dtype=dtype, device=device)
