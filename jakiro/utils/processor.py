"""Checks of what the processor of this machine computes in hardware."""

from functools import cache

import torch

_CHECKS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor multiplies matrices in bfloat16 without converting them first.

    Only processors of the x86 family are recognized.
    """
    return any(getattr(torch.cpu, check, bool)() for check in _CHECKS)
