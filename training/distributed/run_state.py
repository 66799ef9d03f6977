"""The progress of a run, as stored in its checkpoints and in the records of its drafters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class RunState:
    """The progress of a run.

    Attributes:
        tokens: number of tokens read, without padding.
        best_step: number of optimizer steps before the evaluation with that value.
        num_without_gain: number of evaluations after that one, none of which was better.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)
    best_metric: str | None = None
    best_value: float | None = None
    best_step: int | None = None
    num_without_gain: int = 0

    def add_score(self, metric: str, value: float) -> bool:
        """Record the result of an evaluation at this step; return whether it is the best so far.

        If the quantity differs from the earlier one, the value counts as the best so far.
        """
        if metric != self.best_metric or self.best_value is None or value > self.best_value:
            self.best_metric, self.best_value, self.best_step = metric, value, self.step
            self.num_without_gain = 0
            return True
        # A resumed run may repeat evaluations that precede the best one.
        if self.best_step is not None and self.step > self.best_step:
            self.num_without_gain += 1
        return False

    def add_kept(self, kept: Mapping[str, Any] | None) -> None:
        """Take over the score of the drafter in `best`, which may be newer than the checkpoint."""
        if kept is None or kept["best_value"] is None:
            return
        is_same = kept["best_metric"] == self.best_metric and self.best_value is not None
        if is_same and kept["best_value"] <= self.best_value:
            return
        self.best_metric, self.best_value = kept["best_metric"], kept["best_value"]
        self.best_step, self.num_without_gain = kept["best_step"], 0


def record_of(drafter: Path) -> dict[str, Any]:
    """Return the record of a drafter's training, with the `RunState` when it was written."""
    record: dict[str, Any] = json.loads((drafter / "config.json").read_bytes())["record"]
    return record
