"""Interleaved timing, so that a drift of the machine's speed meets all work alike."""

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
    """Return the seconds of a running clock, once the accelerator has done all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds_of(work: Work) -> float:
    """Do the work and return its seconds."""
    started = now()
    work()
    return now() - started


def interleaved(
    works: Mapping[str, Work], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of all work, by name, for each repeat; the order rotates.

    Args:
        works: work to time, by name.
        repeats: number of repeats that count.
        warm_up: number of repeats before them, which do not count.
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
    """Return the median seconds of all work, by name.

    Args:
        works: work to time, by name.
        repeats: number of repeats that count.
        warm_up: number of repeats before them, which do not count.
    """
    return {name: median(taken) for name, taken in interleaved(works, repeats, warm_up).items()}


def repeated(work: Work, count: int) -> Work:
    """Return a function that does the work `count` times.

    Args:
        work: work to repeat.
        count: number of times.
    """
    return partial(_repeat, work, count)


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()


def note(text: str) -> None:
    """Write a line of progress to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


@dataclass
class Peak:
    """A peak of memory in bytes; None where it cannot be measured."""

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
        is_reset = _reset_process()
        yield peak
        peak.bytes = _process_peak() if is_reset else None


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
