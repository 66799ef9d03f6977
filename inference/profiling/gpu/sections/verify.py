"""Verification: milliseconds of the target's forward pass, by context length and tree size."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from inference.benchmark.timing import Work, seconds_of
from inference.engine.cuda_graph import RecordedFunction
from inference.engine.pipeline import STRIDE
from inference.profiling.gpu.arms import NotThere, TimedArm, guarded_row, measured_rows
from inference.profiling.gpu.document import Row, SectionResult
from inference.profiling.gpu.graphs import captured
from inference.profiling.gpu.scale import BUCKET
from inference.profiling.gpu.workbench import Workbench
from jakiro.target import adapter, split_attention
from jakiro.target.cache import SlotCache
from jakiro.target.step import StepInput

CHILDREN = 4  # children of each node of a verified tree
DEFAULT, WITH_CUDNN, CAPTURED = "default", "with cuDNN", "captured"
WHOLE = "all keys in one part"
FIRST_CALL = "first call of a new key length"


class Verification:
    """A forward pass of the target over a root and a tree, and its best tokens.

    Args:
        bench: target and cycle.
        cache: cache with the tokens before the root.
        context: number of these tokens.
        queries: number of queries, including the root.
    """

    def __init__(self, bench: Workbench, cache: SlotCache, context: int, queries: int) -> None:
        self.bench = bench
        self.cache = cache
        self.step = _tree_step(bench, context, queries)
        device = bench.device
        self.best = torch.zeros(1, queries, dtype=torch.long, device=device)
        self.is_finite = torch.zeros(1, queries, dtype=torch.bool, device=device)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Perform the forward pass, without waiting for the device."""
        target = self.bench.target
        logits = target.logits(target.forward(self.step, self.cache).features)
        best = logits.max(dim=-1)
        self.best.copy_(best.indices)
        self.is_finite.copy_(best.values.isfinite())

    def fault(self) -> str | None:
        """Return what is wrong with the best tokens; None if they follow the cycle."""
        if not bool(self.is_finite.all()):
            return "logits are not finite"
        right = self.bench.cycle.successor[self.step.token_ids]
        wrong = int((self.best != right).sum())
        return f"{wrong} of {right.numel()} best tokens are wrong" if wrong else None


def measure_verification(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target and prompts.
        found: results of earlier sections; they are not used.
    """
    scale = bench.scale
    room = max(scale.queries) + BUCKET * (scale.new_lengths + 1)
    cache = filled_cache(bench, max(scale.verify_contexts) + room)
    for context in scale.verify_contexts:
        one: dict[str, float] = {}  # milliseconds of a single query
        for queries in scale.queries:
            conditions = {"context": context, "queries": queries}
            arms = {
                name: arm if isinstance(arm, NotThere) else partial(arm, bench, cache, **conditions)
                for name, arm in ARMS.items()
            }
            for row in measured_rows(arms, conditions, scale):
                yield _relative(row, one)
    for name in (DEFAULT, WITH_CUDNN):
        yield guarded_row(FIRST_CALL, {"backend": name}, partial(_first_calls, bench, cache, name))


@torch.inference_mode()
def filled_cache(bench: Workbench, capacity: int) -> SlotCache:
    """Return a cache of one sequence whose keys and values are random.

    Args:
        bench: target of the cache.
        capacity: number of slots.
    """
    cache = bench.target.new_cache(1, capacity)
    for layer in cache.slot_layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def _tree_step(bench: Workbench, context: int, queries: int) -> StepInput:
    """Return a step over a root and a tree in which every node has `CHILDREN` children."""
    parents = [-1, *((node - 1) // CHILDREN for node in range(1, queries))]
    depths = [0] * queries
    for node in range(1, queries):
        depths[node] = depths[parents[node]] + 1
    device = bench.device
    slots = context + torch.arange(queries, device=device)
    (tokens,) = bench.prompts(queries)
    return StepInput(
        token_ids=torch.tensor([tokens], device=device),
        positions=context + torch.tensor([depths], device=device),
        slots=slots[None],
        lengths=torch.tensor([context], device=device),
        highest_slot=context + queries - 1,
        parents=torch.tensor([parents], device=device),
        max_depth=max(depths) + 1,
    )


def _default(bench: Workbench, cache: SlotCache, context: int, queries: int) -> TimedArm:
    verification = Verification(bench, cache, context, queries)
    return TimedArm(verification, fault=verification.fault)


def _with_cudnn(bench: Workbench, cache: SlotCache, context: int, queries: int) -> TimedArm:
    verification = Verification(bench, cache, context, queries)
    return TimedArm(_allowing_cudnn(verification), fault=verification.fault)


def _as_a_whole(bench: Workbench, cache: SlotCache, context: int, queries: int) -> TimedArm:
    """Return the forward pass with attention that does not process keys in several parts."""
    verification = Verification(bench, cache, context, queries)

    def whole() -> None:
        with patch.object(split_attention, "num_parts", lambda *_: 1):
            verification()

    return TimedArm(whole, fault=verification.fault)


def _in_graph(bench: Workbench, cache: SlotCache, context: int, queries: int) -> TimedArm:
    """Return the default forward pass in a CUDA graph: a bound for captured decoding steps."""
    verification = Verification(bench, cache, context, queries)
    remark = None if bench.device.type == "cuda" else "on a CPU, nothing is captured"
    work = captured(verification, bench.device)
    return TimedArm(work, fault=verification.fault, remark=remark)


def _captured(bench: Workbench, cache: SlotCache, context: int, queries: int) -> TimedArm:
    """Return the forward pass as captured decoding steps perform it: it reads whole strides."""
    verification = Verification(bench, cache, context, queries)
    strides = -(-(context + queries) // STRIDE)
    highest_slot = min(strides * STRIDE, cache.capacity) - 1
    verification.step = replace(verification.step, highest_slot=highest_slot)

    def forward() -> Tensor:
        verification()
        return verification.best

    remark = None if bench.device.type == "cuda" else "on a CPU, nothing is captured"
    work = RecordedFunction(forward, (), bench.device)
    return TimedArm(work, fault=verification.fault, remark=remark)


def _allowing_cudnn(work: Work) -> Work:
    def with_cudnn() -> None:
        with patch.object(adapter, "without_cudnn", nullcontext):
            work()

    return with_cudnn


def _relative(row: Row, one: dict[str, float]) -> Row:
    """Return a row with its time divided by that of a single query, which is kept in `one`."""
    ms = row.number("ms")
    if ms is None or row.values is None:
        return row
    if row.conditions["queries"] == 1:
        one[row.arm] = ms
    if row.arm not in one:
        return row
    return row.model_copy(update={"values": {**row.values, "over_one_query": ms / one[row.arm]}})


def _first_calls(bench: Workbench, cache: SlotCache, name: str) -> Row:
    """Return the time of the first and of the second call, for key lengths that are new."""
    scale = bench.scale
    context, queries = scale.verify_contexts[1], scale.queries[-2]
    first: list[float] = []
    second: list[float] = []
    faults: list[str] = []
    for number in range(1, scale.new_lengths + 1):
        verification = Verification(bench, cache, context + BUCKET * number, queries)
        work = verification if name == DEFAULT else _allowing_cudnn(verification)
        first.append(1e3 * seconds_of(work))
        second.append(1e3 * seconds_of(work))
        faults += [fault] if (fault := verification.fault()) else []
    return Row(
        arm=FIRST_CALL,
        conditions={"backend": name, "context": context, "queries": queries},
        state="invalid" if faults else "measured",
        reason=faults[0] if faults else None,
        values={
            "first_ms": median(first),
            "second_ms": median(second),
            "first_over_second": median(first) / median(second),
        },
    )


Builder = Callable[..., TimedArm]

# An arm that the code does not have yet is replaced by a function like the others.
ARMS: dict[str, Builder | NotThere] = {
    DEFAULT: _default,
    WITH_CUDNN: _with_cudnn,
    "default in a CUDA graph": _in_graph,
    WHOLE: _as_a_whole,
    CAPTURED: _captured,
}
