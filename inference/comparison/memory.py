"""The highest memory use while a piece of work runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


@dataclass
class Peak:
    """What was measured, in bytes; None where it cannot be."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of the device's allocator, or on a CPU of this process (Linux only)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        can_tell = _reset_process()
        yield peak
        peak.bytes = _process_peak() if can_tell else None


def _reset_process() -> bool:
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    except OSError:  # another system, or not allowed
        return False
    return True


def _process_peak() -> int | None:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
