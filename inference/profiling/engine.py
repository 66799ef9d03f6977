"""Measurements of the decode engine, for `jakiro profile engine`.

Progress is printed to standard error.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import PositiveInt

from inference.benchmark.machine import environment
from inference.benchmark.stats import Figure
from inference.profiling.efficiency import measure_efficiency
from inference.profiling.forwards import measure_growth
from inference.profiling.runs import measure_autoregressive, measure_batches, measure_overhead
from inference.profiling.subject import Effort, ProfilingSubject, SubjectSettings, build_subject

Measurement = Literal["autoregressive", "overhead", "growth", "batches", "oracle"]

QUICK = Effort(prompts=2, new_tokens=9, repeats=3)
MEASUREMENTS: dict[Measurement, Callable[[ProfilingSubject], dict[str, Figure]]] = {
    "autoregressive": measure_autoregressive,
    "overhead": measure_overhead,
    "growth": measure_growth,
    "batches": measure_batches,
    "oracle": measure_efficiency,
}


class EngineProfileSettings(SubjectSettings):
    """Target, drafter and effort of the measurements.

    Attributes:
        prompts: number of random prompts.
        new_tokens: number of new tokens per prompt.
        repeats: number of repetitions of single decoding steps.
        only: names of the measurements to take; None for all measurements.
        quick: whether to run for only a few seconds, to test that all measurements work.
    """

    prompts: PositiveInt = 12
    new_tokens: PositiveInt = 97
    repeats: PositiveInt = 24
    only: tuple[Measurement, ...] | None = None
    quick: bool = False


def measure_engine(settings: EngineProfileSettings) -> dict[str, Any]:
    """Take the measurements, and return the JSON output."""
    effort = Effort(settings.prompts, settings.new_tokens, settings.repeats)
    effort = QUICK if settings.quick else effort
    subject = build_subject(settings, effort, is_quick=settings.quick)
    figures: dict[str, Figure] = {}
    for name in settings.only or MEASUREMENTS:
        figures |= MEASUREMENTS[name](subject)
    return {name: figure.headline() for name, figure in figures.items()} | {
        "details": {name: dict(figure.details) for name, figure in figures.items()},
        "environment": environment(subject.target, settings)
        | {"drafter_parameters": subject.drafter.num_parameters()},
    }
