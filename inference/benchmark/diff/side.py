"""Figures of a method in one of two compared results, resampled over prompts."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from inference.benchmark.document import MethodFigures
from inference.benchmark.stats import Floats, divided, pooled_ratio, resample_counts, sums_by_unit

Metric = Literal["tau", "speedup", "tokens_per_second"]


@dataclass(frozen=True)
class Side:
    """Figures of a method and of the baseline of its document at the same temperature.

    Attributes:
        figures: figures of the method.
        baseline: figures of the baseline; None if the baseline was not measured.
    """

    figures: MethodFigures
    baseline: MethodFigures | None

    def units(self) -> dict[str, str]:
        """Return each prompt's resampling unit, named after the prompts decoded together."""
        members: dict[int, set[str]] = {}
        for sample in self.figures.samples:
            members.setdefault(sample.group, set()).add(sample.prompt)
        groups = members.values()
        return {prompt: " ".join(sorted(group)) for group in groups for prompt in group}

    def resampled(self, stream: int) -> dict[Metric, Floats]:
        """Return each figure as an array: the measured value, then the value in every resample.

        Args:
            stream: number of the random stream; paired sides use the same number.
        """
        units = self.units()
        index_of = {unit: index for index, unit in enumerate(sorted(set(units.values())))}
        counts = resample_counts(len(index_of), stream)
        resamples = np.vstack([np.ones((1, len(index_of))), counts])

        def pooled(figures: MethodFigures, top: str, bottom: str) -> Floats:
            def sums(field: str) -> Floats:
                parts = (
                    (units[sample.prompt], getattr(sample, field)) for sample in figures.samples
                )
                return sums_by_unit(parts, index_of)

            return pooled_ratio(sums(top), sums(bottom), resamples)

        speed = pooled(self.figures, "tokens", "seconds")
        # The first token of every chat turn comes from prefill and is not a decoded token.
        values: dict[Metric, Floats] = {"tau": pooled(self.figures, "decoded", "target_forwards")}
        if self.baseline is not None and self.baseline is not self.figures:
            values["speedup"] = divided(speed, pooled(self.baseline, "tokens", "seconds"))
        values["tokens_per_second"] = speed
        return values
