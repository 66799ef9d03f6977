"""The processor of this machine: its name, and what it computes in hardware."""

import platform
from functools import cache
from pathlib import Path

import torch

_CHECKS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor multiplies matrices in bfloat16 without converting them first.

    Only processors of the x86 family are recognized.
    """
    return any(getattr(torch.cpu, check, bool)() for check in _CHECKS)


def instructions() -> list[object]:
    """Return facts about the processor's instructions, as virtual machines may hide its name."""
    return [torch.backends.cpu.get_cpu_capability(), computes_bfloat16()]


def processor() -> str:
    """Return the name of this machine's processor."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        names = [line for line in facts.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()
