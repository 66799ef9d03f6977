"""A decoding step: milliseconds of its parts, launches, waits, and the GPU's busy share."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from inference.benchmark.timing import Work, now, repeated, seconds_of
from inference.profiling.gpu.arms import guarded_row
from inference.profiling.gpu.document import Conditions, Row, SectionResult, Value
from inference.profiling.gpu.parts import milliseconds_of_parts
from inference.profiling.gpu.workbench import Workbench

TAU = 3
TEMPERATURES = (0.0, 1.0)
DRAFTED, AUTOREGRESSIVE = "drafted", "autoregressive"
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


def measure_step(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target, drafter and prompts.
        found: results of earlier sections; they are not used.
    """
    for temperature in TEMPERATURES:
        for arm in (DRAFTED, AUTOREGRESSIVE):
            conditions = {"temperature": temperature, "context": bench.scale.main_context}
            yield guarded_row(arm, conditions, partial(_row, bench, arm, conditions))


def _row(bench: Workbench, name: str, conditions: Conditions) -> Row:
    """Return a row of three runs with equally many steps: timed, timed by part, and traced."""
    scale = bench.scale
    tau = TAU if name == DRAFTED else 1
    prompts = bench.prompts(scale.main_context)
    drafter = bench.oracle(TAU, is_drafting=True) if name == DRAFTED else None
    new_tokens = (3 * scale.num_steps + scale.warm_up + 1) * tau + 1
    run = bench.start(drafter, prompts, new_tokens, float(conditions["temperature"]))
    arm = bench.steps(run, prompts, 1, tau)
    repeated(arm.work, scale.warm_up)()
    steps = repeated(arm.work, scale.num_steps)
    seconds = [seconds_of(arm.work) for _ in range(scale.num_steps)]
    values: dict[str, Value] = {"ms": 1e3 * median(seconds)}
    parts = milliseconds_of_parts(run, steps, scale.num_steps)
    values |= {f"{part}_ms": ms for part, ms in parts.items()}
    counts = traced(steps)
    if counts is not None:
        values |= {
            "launches": counts.launches / scale.num_steps,
            "copies": counts.copies / scale.num_steps,
            "waits": counts.waits / scale.num_steps,
            "gpu_busy": counts.busy,
        }
    fault = arm.fault()
    return Row(
        arm=name,
        conditions=conditions,
        state="measured" if fault is None else "invalid",
        reason=fault
        or (None if counts else "no launches were recorded: no GPU, or no permission to profile"),
        values=values,
    )


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
