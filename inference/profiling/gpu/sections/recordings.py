"""Compilation and recording: seconds lost before decoding steps reach their full speed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from inference.benchmark.timing import repeated, seconds_of
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.cuda_graph import RecordedFunction
from inference.engine.pipeline import PipelinePool
from inference.profiling.gpu.arms import guarded_row
from inference.profiling.gpu.cycle_drafter import CycleDrafter
from inference.profiling.gpu.document import Conditions, Row, SectionResult, Value
from inference.profiling.gpu.workbench import Workbench
from inference.profiling.subject import start
from jakiro.target.adapter import TargetAdapter

TAU = 3
EAGER, COMPILED, CAPTURED = "eager", "compiled", "captured"
BREAK_EVEN = "tokens until compilation pays"


@dataclass(frozen=True)
class Decoder:
    """A target and a drafter that are compiled or recorded, if at all, when they are first used."""

    target: TargetAdapter
    drafter: CycleDrafter
    remark: str | None = None
    pipelines: PipelinePool | None = None  # for captured steps


@dataclass
class GraphCounts:
    """Numbers of graphs during a request; None if they are unknown."""

    recordings: int | None = None  # CUDA graphs
    compilations: int | None = None  # graphs that were compiled
    graph_breaks: int | None = None


def measure_recordings(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section: three requests in turn, and the same requests again.

    Args:
        bench: target, drafter and prompts.
        found: results of earlier sections; they are not used.
    """
    rows: list[Row] = []
    for row in _requests(bench):
        rows.append(row)
        yield row
    yield break_even(rows)


def break_even(rows: Sequence[Row]) -> Row:
    """Return the number of tokens after which compilation has saved the time that it takes.

    Args:
        rows: rows of all requests.
    """

    def numbers(arm: str, attempt: str, key: str) -> list[float]:
        own = [row for row in rows if (row.arm, row.conditions.get("attempt")) == (arm, attempt)]
        return [number for row in own if (number := row.number(key)) is not None]

    first, second = (numbers(COMPILED, attempt, "seconds") for attempt in ("first", "second"))
    ms = [numbers(arm, "second", "ms") for arm in (EAGER, COMPILED)]
    if not (second and len(first) == len(second) and all(ms)):
        reason = "the requests were not all measured"
        return Row(arm=BREAK_EVEN, state="not measured", reason=reason)
    lost = sum(first) - sum(second)
    saved = (median(ms[0]) - median(ms[1])) / 1e3  # seconds per token
    values: dict[str, Value] = {"seconds_lost": lost}
    if saved <= 0:
        return Row(arm=BREAK_EVEN, reason="compiled steps are not faster", values=values)
    return Row(arm=BREAK_EVEN, values={**values, "tokens": max(lost, 0.0) / saved})


def _requests(bench: Workbench) -> Iterator[Row]:
    for name, arm in ARMS.items():
        decoders: list[Decoder] = []
        for number, length in enumerate(bench.scale.request_lengths):
            for attempt in ("first", "second"):
                conditions = {"request": number, "prompt_tokens": length, "attempt": attempt}
                measure = partial(_request, bench, name, arm, decoders, conditions)
                yield guarded_row(name, conditions, measure)


def _request(
    bench: Workbench,
    name: str,
    arm: Callable[[Workbench], Decoder],
    decoders: list[Decoder],
    conditions: Conditions,
) -> Row:
    """Return the row of one request; the first request prepares the decoder."""
    if not decoders:
        decoders.append(arm(bench))
    (decoder,) = decoders
    prompts = bench.prompts(int(conditions["prompt_tokens"]))
    num_steps = -(-bench.scale.request_tokens // TAU)
    num_tokens = (num_steps + 1) * TAU
    run = start(decoder.target, decoder.drafter, prompts, num_tokens, pipelines=decoder.pipelines)
    with _counted(bench.device) as counts:
        steps = bench.steps(run, prompts, 1, TAU)
        seconds = seconds_of(repeated(steps.work, num_steps))
    fault = steps.fault()
    run.close()
    return Row(
        arm=name,
        conditions=conditions,
        state="measured" if fault is None else "invalid",
        reason=fault or decoder.remark,
        values={
            "ms": 1e3 * seconds / (num_steps * TAU),
            "seconds": seconds,
            "tokens_per_second": num_steps * TAU / seconds,
            "recordings": counts.recordings,
            "compilations": counts.compilations,
            "graph_breaks": counts.graph_breaks,
        },
    )


@contextmanager
def _counted(device: torch.device) -> Iterator[GraphCounts]:
    """Count the graphs that are recorded and compiled in a `with` block."""
    counts = GraphCounts()
    if device.type != "cuda":
        yield counts
        return
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    recording = [  # the methods that record a CUDA graph
        (owner, name, getattr(owner, name))
        for owner, name in (
            (CUDAGraphTreeManager, "record_function"),
            (RecordedFunction, "_record"),
        )
        if hasattr(owner, name)
    ]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    counts.recordings = 0

    def counting(record: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            counts.recordings = (counts.recordings or 0) + 1
            return record(*args, **kwargs)

        return counted

    for owner, name, record in recording:
        setattr(owner, name, counting(record))
    try:
        yield counts
    finally:
        for owner, name, record in recording:
            setattr(owner, name, record)
        counts.compilations = counters["stats"]["unique_graphs"] - graphs
        counts.graph_breaks = sum(counters["graph_break"].values()) - breaks


def _eager(bench: Workbench) -> Decoder:
    return Decoder(bench.target, bench.oracle(TAU, is_drafting=True))


def _compiled(bench: Workbench) -> Decoder:
    """Return a decoder as with `compiled=True`; on a CPU, nothing is compiled."""
    is_on_gpu = bench.device.type == "cuda"
    target = TargetAdapter(bench.model)
    if is_on_gpu:
        target.compile()
    trained = TrainedDrafter.for_target(
        bench.new_drafter(bench.scale.draft_vocab_size),
        target,
        trees=bench.scale.plan,
        compiled=is_on_gpu,
    )
    oracle = CycleDrafter(bench.cycle, TAU - 1, bench.scale.plan, trained)
    return Decoder(target, oracle, None if is_on_gpu else "on a CPU, nothing is compiled")


def _captured(bench: Workbench) -> Decoder:
    """Return a decoder as with `captured=True`; on a CPU, nothing is recorded."""
    remark = None if bench.device.type == "cuda" else "on a CPU, nothing is recorded"
    oracle = bench.oracle(TAU, is_drafting=True)
    return Decoder(bench.target, oracle, remark, PipelinePool())


ARMS: dict[str, Callable[[Workbench], Decoder]] = {
    EAGER: _eager,
    COMPILED: _compiled,
    CAPTURED: _captured,
}
