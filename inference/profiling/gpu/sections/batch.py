"""Batches: speed over autoregressive decoding, the host's time per sequence, and peak memory."""

from collections.abc import Iterator, Mapping
from functools import partial

from inference.benchmark.timing import Peak, peak_memory, repeated
from inference.profiling.gpu.arms import TimedArm, guarded_row, measured_rows
from inference.profiling.gpu.document import Conditions, Row, SectionResult
from inference.profiling.gpu.parts import milliseconds_of_parts
from inference.profiling.gpu.sections.autoregressive import CAPTURED, static_arm
from inference.profiling.gpu.sections.headline import drafted_arm, factor_of, over_baseline
from inference.profiling.gpu.workbench import Workbench

TAU = 3
DRAFTED, PARTS = "drafted", "parts of a decoding step"


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
