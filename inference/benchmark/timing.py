"""Seconds of several pieces of work that take turns, so that a drift of speed meets all alike."""

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
    """Return seconds on a running clock, after everything that an accelerator has yet to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds_of(work: Work) -> float:
    """Return the seconds that `work` takes."""
    started = now()
    work()
    return now() - started


def interleaved(
    works: Mapping[str, Work], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return seconds of every piece of work, by name, for each of `repeats` rounds.

    Who begins rotates from round to round; the first `warm_up` rounds are thrown away.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for work in range(warm_up + repeats):
        first = work % len(names)
        for name in (*names[first:], *names[:first]):
            taken = seconds_of(works[name])
            if work >= warm_up:
                seconds[name].append(taken)
    return seconds


def medians(works: Mapping[str, Work], repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Return the median seconds of every piece of work."""
    return {name: median(taken) for name, taken in interleaved(works, repeats, warm_up).items()}


def repeated(work: Work, count: int) -> Work:
    """Return work that is done `count` times."""
    return partial(_repeat, work, count)


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()


def note(text: str) -> None:
    """Tell of progress on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
