"""Headline: tokens per second of an oracle, relative to the fastest autoregressive decoding."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from inference.engine.pipeline import PipelinePool
from inference.profiling.efficiency import measure_efficiency
from inference.profiling.gpu.arms import TimedArm, guarded_row, measured_rows
from inference.profiling.gpu.document import Conditions, Row, SectionResult
from inference.profiling.gpu.sections.autoregressive import CAPTURED, baseline_of, static_arm
from inference.profiling.gpu.sections.machine import bandwidth
from inference.profiling.gpu.workbench import Workbench
from inference.profiling.subject import Effort, ProfilingSubject

TEMPERATURES = (0.0, 1.0)
ALONE, DRAFTING = "oracle", "oracle with the cost of drafting"
CAPTURED_DRAFTING = "oracle with the cost of drafting, captured"
BASELINE = "fastest autoregressive decoding"
EFFICIENCY = "share of the speed-up that the forward passes allow"


def measure_headline(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target, drafter and prompts.
        found: results of earlier sections, among them the baseline.
    """
    yield _baseline(bench, found)
    for tau in bench.scale.taus:
        for temperature in TEMPERATURES:
            yield from _rows(bench, found, tau, temperature)
    yield guarded_row(EFFICIENCY, {}, lambda: _efficiency(bench))


def over_baseline(rows: list[Row], factor: float) -> Iterator[Row]:
    """Yield rows with their speed over that of the fastest autoregressive decoding.

    Args:
        rows: rows of the captured static cache and of other arms, which were timed in turn.
        factor: milliseconds of the fastest arm over those of the captured static cache.
    """
    captured_ms = next((row.number("ms") for row in rows if row.arm == CAPTURED), None)
    for row in rows:
        ms = row.number("ms")
        if captured_ms is None or ms is None or row.values is None:
            yield row
            continue
        ratio = factor * captured_ms / ms
        yield row.model_copy(update={"values": {**row.values, "ratio": ratio}})


def factor_of(bench: Workbench, found: Mapping[str, SectionResult]) -> float:
    """Return the milliseconds of the fastest arm over those of the captured static cache.

    Without a result of the section on autoregressive decoding, the captured static cache is the
    baseline, and the factor is 1.

    Args:
        bench: contexts of the measurements.
        found: results of earlier sections.
    """
    baseline = baseline_of(found, bench.scale.main_context)
    return 1.0 if baseline is None else baseline.ms / baseline.captured_ms


def drafted_arm(
    bench: Workbench,
    prompts: list[list[int]],
    tau: int,
    temperature: float,
    *,
    is_drafting: bool,
    is_captured: bool = False,
) -> TimedArm:
    """Return decoding steps of an oracle.

    Args:
        bench: target and drafter.
        prompts: prompts, which are read now.
        tau: number of tokens per decoding step.
        temperature: sampling temperature; 0 is greedy.
        is_drafting: whether the random drafter drafts every tree.
        is_captured: whether decoding steps are captured.
    """
    scale = bench.scale
    count = max(1, scale.block // tau)
    oracle = bench.oracle(tau, is_drafting=is_drafting)
    new_tokens = (count * (scale.repeats + scale.warm_up) + 1) * tau + 1
    pipelines = PipelinePool() if is_captured else None
    run = bench.start(oracle, prompts, new_tokens, temperature, pipelines)
    return bench.steps(run, prompts, count, tau)


def _baseline(bench: Workbench, found: Mapping[str, SectionResult]) -> Row:
    """Return the fastest autoregressive decoding, to which ratios refer."""
    baseline = baseline_of(found, bench.scale.main_context)
    conditions: Conditions = {"context": bench.scale.main_context}
    if baseline is None:
        reason = f"there is no such measurement, so ratios refer to {CAPTURED!r}"
        return Row(arm=BASELINE, conditions=conditions, state="not measured", reason=reason)
    return Row(arm=BASELINE, conditions=conditions, values=baseline._asdict())


def _rows(
    bench: Workbench, found: Mapping[str, SectionResult], tau: int, temperature: float
) -> Iterator[Row]:
    prompts = bench.prompts(bench.scale.main_context)
    conditions = {"tau": tau, "temperature": temperature, "context": bench.scale.main_context}
    arms: dict[str, Any] = {
        CAPTURED: partial(static_arm, bench, prompts, is_captured=True),
        ALONE: partial(drafted_arm, bench, prompts, tau, temperature, is_drafting=False),
        DRAFTING: partial(drafted_arm, bench, prompts, tau, temperature, is_drafting=True),
        CAPTURED_DRAFTING: partial(
            drafted_arm, bench, prompts, tau, temperature, is_drafting=True, is_captured=True
        ),
    }
    rows = list(measured_rows(arms, conditions, bench.scale))
    for row in over_baseline(rows, factor_of(bench, found)):
        yield _bounded(bench, row, tau, bandwidth(found))


def _bounded(bench: Workbench, row: Row, tau: int, bytes_per_second: float | None) -> Row:
    """Return a row with the ratio and the time if only the bytes that are read took time."""
    if row.values is None:
        return row
    whole = step_bytes(bench, bench.scale.main_context)
    read = whole if row.arm in (CAPTURED, ALONE) else whole + _draft_bytes(bench)
    tokens = 1 if row.arm == CAPTURED else tau
    bound: dict[str, float | None] = {"bytes_ratio": tokens * whole / read}
    if bytes_per_second is not None:
        bound["bytes_ms"] = 1e3 * read / bytes_per_second / tokens
    return row.model_copy(update={"values": {**row.values, **bound}})


def step_bytes(bench: Workbench, context: int) -> int:
    """Return the bytes that a forward pass reads: weights except embeddings, keys and values.

    Args:
        bench: target.
        context: number of cached tokens.
    """
    model = bench.model
    embeddings = model.get_input_embeddings().weight
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    table = embeddings.numel() * embeddings.element_size()  # type: ignore[operator]
    return weights - int(table) + context * bench.target.new_cache(1, 1).bytes_per_token


def _draft_bytes(bench: Workbench) -> int:
    """Return the bytes of the drafter and of the draft head that the passes of a tree read."""
    drafter = bench.drafter
    size = bench.target.dtype.itemsize
    weights = sum(each.numel() * size for each in drafter.parameters())
    head = bench.scale.draft_vocab_size * bench.target.spec.hidden_size * size
    return bench.scale.tree.autoregressive_levels * (weights + head)


def _efficiency(bench: Workbench) -> Row:
    """Return the speed-up of an oracle as a share of what its forward passes allow."""
    scale = bench.scale
    effort = Effort(prompts=2, new_tokens=scale.timed_tokens, repeats=scale.repeats)
    prompts = bench.prompts(scale.main_context, effort.prompts)
    subject = ProfilingSubject(bench.target, bench.drafter, prompts, effort)
    (figure,) = measure_efficiency(subject).values()
    value = None if figure.interval is None else figure.interval.value
    return Row(arm=EFFICIENCY, values={"share": value, "details": dict(figure.details)})
