"""Which value of a sweep each arm is trained with: dev prompts decide, test prompts never do."""

import math
from collections.abc import Sequence

from inference.comparison.document import ComparisonDocument
from training.ablation.evaluation import Measurement
from training.ablation.results import ArmSweep, SweepResults
from training.ablation.runs import ArmRun
from training.ablation.sweep import Sweep, value_name


def choose_values(sweep: Sweep, runs: Sequence[ArmRun], measurement: Measurement) -> SweepResults:
    """Return what dev prompts say of the values; what is measured already is not measured again.

    Every arm is measured by itself, for only tau decides, which others' company does not change.

    Args:
        sweep: the values.
        runs: of one seed, every arm with every value, all trained.
        measurement: on dev prompts.

    Raises:
        JakiroError: a measurement failed.
    """
    names = dict.fromkeys(run.arm for run in runs)
    documents = {
        name: measurement.of_values([run for run in runs if run.arm == name]) for name in names
    }
    return SweepResults(
        key=sweep.key,
        values=sweep.values,
        temperatures=measurement.temperatures,
        seed=runs[0].seed,
        prompts=max(one.prompts for one in documents.values()),
        arms=tuple(choose_value(name, sweep, one) for name, one in documents.items()),
    )


def choose_value(arm: str, sweep: Sweep, document: ComparisonDocument) -> ArmSweep:
    """Return what a document says of an arm; its methods are called as the values are."""
    temperatures = dict.fromkeys(one.temperature for one in document.methods)
    tau = [
        [document.figures(value_name(value), temperature).tau for value in sweep.values]
        for temperature in temperatures
    ]
    scores = [math.prod(column) ** (1 / len(column)) for column in zip(*tau, strict=True)]
    # The highest score, and of equal ones the smallest value.
    best = max(zip(scores, sweep.values, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return ArmSweep(
        arm=arm,
        tau=tuple(map(tuple, tau)),
        score=tuple(scores),
        chosen=best[1],
    )
