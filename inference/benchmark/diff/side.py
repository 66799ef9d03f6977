"""One side of a comparison of two results: a method in one document, resampled by prompts."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from inference.benchmark.document import MethodFigures
from inference.benchmark.stats import Floats, divided, draws, pooled_ratio, sums_by_unit

Metric = Literal["tau", "speedup", "tokens_per_second"]


@dataclass(frozen=True)
class Side:
    """A method, and the baseline of its document at the same temperature, if there is one."""

    figures: MethodFigures
    baseline: MethodFigures | None

    def units(self) -> dict[str, str]:
        """Return for every prompt the unit that is resampled: all prompts decoded with it."""
        members: dict[int, set[str]] = {}
        for sample in self.figures.samples:
            members.setdefault(sample.group, set()).add(sample.prompt)
        groups = members.values()
        return {prompt: " ".join(sorted(group)) for group in groups for prompt in group}

    def resampled(self, stream: int) -> dict[Metric, Floats]:
        """Return each figure as an array: its value first, then its value in every resample.

        Args:
            stream: number of the random stream; paired sides share it.
        """
        units = self.units()
        place_of = {unit: place for place, unit in enumerate(sorted(set(units.values())))}
        resamples = np.vstack([np.ones((1, len(place_of))), draws(len(place_of), stream)])

        def pooled(figures: MethodFigures, top: str, bottom: str) -> Floats:
            def sums(field: str) -> Floats:
                parts = ((units[one.prompt], getattr(one, field)) for one in figures.samples)
                return sums_by_unit(parts, place_of)

            return pooled_ratio(sums(top), sums(bottom), resamples)

        speed = pooled(self.figures, "tokens", "seconds")
        # The first token of every turn comes from prefill, so it is not among the decoded ones.
        values: dict[Metric, Floats] = {"tau": pooled(self.figures, "decoded", "target_forwards")}
        if self.baseline is not None and self.baseline is not self.figures:
            values["speedup"] = divided(speed, pooled(self.baseline, "tokens", "seconds"))
        values["tokens_per_second"] = speed
        return values
