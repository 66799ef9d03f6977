"""Counts of kernel launches and waits, and the busy time of a GPU, from a profiler's trace."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from inference.benchmark.timing import Work, now

WINDOW = "jakiro profile gpu"  # name of the range in which events are counted
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of work of the GPU
ON_HOST = {"cuda_runtime", "cuda_driver"}  # categories of calls of the host
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")
COPIES = ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset")
WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",  # a copy that waits; the one that does not is cudaMemcpyAsync
}

Event = Mapping[str, Any]


class TraceCounts(NamedTuple):
    """Events in the window of a trace."""

    launches: int  # kernels and graphs
    copies: int  # copies and fills, which the host queues like kernels
    waits: int  # calls in which the host waits for the GPU
    busy: float  # share of the time in which the GPU works


def traced(work: Work) -> TraceCounts | None:
    """Call a function, and return the counts of its events; None if no launch was recorded.

    Nothing is recorded without a GPU, and without the permission to profile it.

    Args:
        work: function that uses the GPU.
    """
    if not torch.cuda.is_available():
        work()
        return None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            now()
            with record_function(WINDOW):
                work()
            now()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    counts = counts_of(events)
    return counts if counts.launches else None


def counts_of(events: Sequence[Event]) -> TraceCounts:
    """Return the counts of the events in the window.

    Args:
        events: events of a Chrome trace, with times in microseconds.

    Raises:
        ValueError: the trace has no window.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    windows = [
        event
        for event in whole
        if event.get("name") == WINDOW and event.get("cat") == "user_annotation"
    ]
    if not windows:
        raise ValueError(f"the trace has no range with the name {WINDOW!r}")
    start = float(windows[0]["ts"])
    end = start + float(windows[0]["dur"])
    inside = [event for event in whole if start <= float(event["ts"]) < end]
    names = [str(event["name"]) for event in inside if event.get("cat") in ON_HOST]
    return TraceCounts(
        launches=sum(name.startswith(LAUNCHES) for name in names),
        copies=sum(name.startswith(COPIES) for name in names),
        waits=sum(name in WAITS for name in names),
        busy=_busy(_spans(inside, end)) / (end - start),
    )


def _spans(events: Iterable[Event], end: float) -> list[tuple[float, float]]:
    """Return the beginning and the end of all work of the GPU, at most until `end`."""
    return [
        (float(event["ts"]), min(float(event["ts"]) + float(event["dur"]), end))
        for event in events
        if event.get("cat") in ON_DEVICE
    ]


def _busy(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, covered), 0.0)
        covered = max(covered, end)
    return total
