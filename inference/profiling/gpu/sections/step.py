"""A decoding step: milliseconds of its parts, launches, waits, and the GPU's busy share."""

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median

from inference.benchmark.timing import repeated, seconds_of
from inference.profiling.gpu.arms import guarded_row
from inference.profiling.gpu.document import Conditions, Row, SectionResult, Value
from inference.profiling.gpu.parts import milliseconds_of_parts
from inference.profiling.gpu.trace import traced
from inference.profiling.gpu.workbench import Workbench

TAU = 3
TEMPERATURES = (0.0, 1.0)
DRAFTED, AUTOREGRESSIVE = "drafted", "autoregressive"


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
