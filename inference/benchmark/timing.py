"""The time, and the peak memory of a measurement."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


def now() -> float:
    """Return the seconds of a monotonic clock, after the accelerator has done all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


@dataclass
class Peak:
    """Peak memory in bytes; None if it cannot be measured."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the device's allocator; on a CPU, of this process (on Linux)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        is_reset = _reset_process()
        yield peak
        peak.bytes = _process_peak() if is_reset else None


def _reset_process() -> bool:
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    except OSError:  # the system is not Linux, or writing is not allowed
        return False
    return True


def _process_peak() -> int | None:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
