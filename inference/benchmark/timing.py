"""Interleaved timing of functions, peak memory, and progress messages.

Functions are timed alternately, so that a drift of the machine's speed affects them equally.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

Work = Callable[[], object]


def now() -> float:
    """Return the seconds of a monotonic clock, after the accelerator has done all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds_of(work: Work) -> float:
    """Call a function, and return how many seconds the call took."""
    started = now()
    work()
    return now() - started


def interleaved(
    works: Mapping[str, Work], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return, for the name of each function, the seconds that it took in each repeat.

    The order in which the functions are called rotates from one repeat to the next.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for repeat in range(warm_up + repeats):
        first = repeat % len(names)
        for name in (*names[first:], *names[:first]):
            taken = seconds_of(works[name])
            if repeat >= warm_up:
                seconds[name].append(taken)
    return seconds


def medians(works: Mapping[str, Work], repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Return, for the name of each function, the median of the seconds that it took."""
    return {name: median(taken) for name, taken in interleaved(works, repeats, warm_up).items()}


def repeated(work: Work, count: int) -> Work:
    """Return a function that calls another function `count` times."""
    return partial(_repeat, work, count)


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()


def note(text: str) -> None:
    """Write a progress message to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
