"""Batches: speed over autoregressive decoding, the host's time per sequence, and peak memory."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from inference.benchmark.timing import Peak, peak_memory, repeated, seconds_of
from inference.engine.lane import Lane
from inference.engine.loop import DecodeRun
from inference.engine.request import Request, SequenceState
from inference.generation.preparation import prepare_requests
from inference.profiling.gpu.arms import TimedArm, guarded_row, measured_rows
from inference.profiling.gpu.cycle_drafter import CycleDrafter
from inference.profiling.gpu.document import Conditions, Row, SectionResult
from inference.profiling.gpu.parts import milliseconds_of_parts
from inference.profiling.gpu.sections.autoregressive import CAPTURED, static_arm
from inference.profiling.gpu.sections.headline import drafted_arm, factor_of, over_baseline
from inference.profiling.gpu.workbench import Workbench

TAU = 3
DRAFTED, PARTS = "drafted", "parts of a decoding step"
LANES = "twice as many requests as lanes, over two batches"


def measure_batch_sizes(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target, drafter and prompts.
        found: results of earlier sections, among them the baseline.
    """
    for batch in bench.scale.batches:
        prompts = bench.prompts(bench.scale.main_context, batch)
        conditions = {"batch": batch, "context": bench.scale.main_context}
        arms = {
            CAPTURED: partial(static_arm, bench, prompts, is_captured=True),
            DRAFTED: partial(_drafted, bench, prompts),
        }
        rows = list(measured_rows(arms, conditions, bench.scale))
        yield from over_baseline(rows, factor_of(bench, found))
        yield guarded_row(PARTS, conditions, partial(_parts, bench, prompts, conditions))
    conditions = {"lanes": bench.scale.batches[-1]}
    yield guarded_row(LANES, conditions, partial(_lanes, bench, conditions))


def _drafted(bench: Workbench, prompts: list[list[int]]) -> TimedArm:
    return drafted_arm(bench, prompts, TAU, 0.0, is_drafting=True)


def _parts(bench: Workbench, prompts: list[list[int]], conditions: Conditions) -> Row:
    """Return the parts of a step, the host's time per sequence, and the peak memory of a run.

    The host's time consists of acceptance, of which the device's part is small, and of everything
    that is not a part.
    """
    scale = bench.scale
    peak: Peak
    with peak_memory(bench.device) as peak:
        oracle = bench.oracle(TAU, is_drafting=True)
        new_tokens = (scale.num_steps + scale.warm_up + 1) * TAU + 1
        run = bench.start(oracle, prompts, new_tokens)
        arm = bench.steps(run, prompts, 1, TAU)
        repeated(arm.work, scale.warm_up)()
        parts = milliseconds_of_parts(run, repeated(arm.work, scale.num_steps), scale.num_steps)
    fault = arm.fault()
    run.close()
    return Row(
        arm=PARTS,
        conditions=conditions,
        state="measured" if fault is None else "invalid",
        reason=fault,
        values={
            **{f"{part}_ms": ms for part, ms in parts.items()},
            "host_ms_per_sequence": (parts["accept"] + parts["host"]) / len(prompts),
            "peak_bytes": peak.bytes,
        },
    )


def _lanes(bench: Workbench, conditions: Conditions) -> Row:
    """Return the time of two batches of requests, over that of the same requests through lanes.

    A request that is complete leaves its place to the next one, whereas in a batch the places of
    complete requests remain empty until the longest request is complete.
    """
    lanes = int(conditions["lanes"])
    prompts = bench.prompts(bench.scale.request_lengths[0], 2 * lanes)
    longest = bench.scale.request_tokens
    # Every length from one step to the longest occurs equally often, in a mixed order.
    lengths = [1 + (7 * number * longest // (2 * lanes)) % longest for number in range(2 * lanes)]
    oracle = bench.oracle(TAU, is_drafting=True)
    requests = [_request(bench, *each) for each in zip(prompts, lengths, strict=True)]
    batches = [
        DecodeRun(bench.target, oracle, part) for part in (requests[:lanes], requests[lanes:])
    ]
    in_batches = seconds_of(lambda: [run.finish() for run in batches])
    lane, tokens = _open_lane(bench, oracle, requests, lanes), list[list[int]]()
    in_lanes = seconds_of(lambda: tokens.extend(_through(lane, requests)))
    lane.close()
    fault = bench.fault(prompts, tokens)
    return Row(
        arm=LANES,
        conditions=conditions,
        state="measured" if fault is None else "invalid",
        reason=fault,
        values={
            "ratio": in_batches / in_lanes,
            "seconds": in_lanes,
            "batches_seconds": in_batches,
            "tokens": sum(lengths),
        },
    )


def _request(bench: Workbench, prompt: list[int], new_tokens: int) -> Request:
    requests, _ = prepare_requests(
        bench.model,
        [prompt],
        {"max_new_tokens": new_tokens},
        temperature=0.0,
        seed=0,
        max_position=bench.target.spec.max_position,
    )
    return requests[0]


def _open_lane(
    bench: Workbench, drafter: CycleDrafter, requests: Sequence[Request], places: int
) -> Lane:
    capacity = max(request.max_length for request in requests)
    return Lane(bench.target, drafter, requests[0].sampling, places, capacity)


@torch.inference_mode()
def _through(lane: Lane, requests: Sequence[Request]) -> list[list[int]]:
    """Decode requests, each of which starts as soon as there is a place; return their tokens."""
    states = [SequenceState.of(index, request) for index, request in enumerate(requests)]
    waiting = deque(states)
    while waiting or lane.live:
        while waiting and lane.num_free:
            state = waiting.popleft()
            prefill = lane.prefill_of([state])
            while not prefill.is_complete:
                prefill.read_chunk()
            lane.start(prefill, [state])
        if lane.live:
            lane.step()
    return [state.new_token_ids for state in states]
