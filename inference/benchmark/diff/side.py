"""Figures of a method in one of two compared results, resampled over prompts."""

from typing import Literal, NamedTuple

import numpy as np

from inference.benchmark.document import MethodFigures
from inference.benchmark.stats import Floats, divided, pooled_ratio, resample_counts, sums_by_unit

Metric = Literal["tau", "speedup", "tokens_per_second"]


class Side(NamedTuple):
    """Figures of a method and of the baseline of its document at the same temperature."""

    figures: MethodFigures
    baseline: MethodFigures | None  # None if the baseline was not measured

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
        resamples = np.vstack([np.ones(len(index_of)), resample_counts(len(index_of), stream)])

        def pooled(figures: MethodFigures, *names: str) -> Floats:
            samples = [(units[sample.prompt], sample) for sample in figures.samples]
            parts = (
                [(unit, float(getattr(sample, name))) for unit, sample in samples] for name in names
            )
            top, bottom = (sums_by_unit(part, index_of) for part in parts)
            return pooled_ratio(top, bottom, resamples)

        speed = pooled(self.figures, "tokens", "seconds")
        # The first token of every chat turn comes from prefill and is not a decoded token.
        values: dict[Metric, Floats] = {"tau": pooled(self.figures, "decoded", "target_forwards")}
        if self.baseline is not None and self.baseline is not self.figures:
            values["speedup"] = divided(speed, pooled(self.baseline, "tokens", "seconds"))
        values["tokens_per_second"] = speed
        return values
