"""The processor of this machine: its name, and what it and a GPU compute in hardware."""

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


def native_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if a device multiplies matrices in this dtype in hardware, else float32.

    Args:
        device: a processor or a GPU; other kinds of devices are taken to compute in float32.
    """
    if device.type == "cuda":
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_native = device.type == "cpu" and computes_bfloat16()
    return torch.bfloat16 if is_native else torch.float32


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
