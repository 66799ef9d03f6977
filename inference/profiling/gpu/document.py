"""The JSON document of `jakiro profile gpu`: environment, rows of every section, and criteria.

`python -c "from inference.profiling.gpu.document import schema; print(schema())"` prints the JSON
schema of the document.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jakiro.utils.settings import Settings

Conditions = Mapping[str, float | int | str]
Value = float | int | str | bool | None | tuple[Any, ...] | dict[str, Any]

# measured: the tokens are right; invalid: tokens or logits are wrong; failed: an error was raised;
# not there yet: the code does not have this arm; not measured: this machine cannot measure it.
RowState = Literal["measured", "invalid", "failed", "not there yet", "not measured"]
CriterionState = Literal["met", "missed", "not there yet", "not measured"]


class Row(Settings):
    """The measurement of one arm under certain conditions.

    Attributes:
        arm: name of what was measured.
        conditions: conditions such as the context or the temperature.
        state: whether there is a measurement, and whether it is valid.
        reason: reason in words if the arm was not measured or is invalid, or a remark.
        values: measured values, `ms` in milliseconds per token, step or call; None if there are
            none.
    """

    arm: str
    conditions: Conditions = Field(default_factory=dict)
    state: RowState = "measured"
    reason: str | None = None
    values: dict[str, Value] | None = None

    def number(self, key: str) -> float | None:
        """Return a measured number; None if the row is not valid or has no such number."""
        value = (self.values or {}).get(key) if self.state == "measured" else None
        return float(value) if isinstance(value, int | float) else None


class SectionResult(Settings):
    """The rows of a section.

    Attributes:
        minutes: time limit.
        seconds: duration.
        before: clocks, power and temperature of the GPU before the section; None if unknown.
        after: the same after the section.
        rows: rows that were measured before the section ended.
        error: error that ended the section; None if it is complete.
    """

    minutes: float
    seconds: float | None = None
    before: dict[str, float | str] | None = None
    after: dict[str, float | str] | None = None
    rows: tuple[Row, ...] = ()
    error: str | None = None

    def find(self, arm: str, **conditions: float | int | str) -> Row | None:
        """Return the first row of an arm that has these conditions, among others; None without one.

        Args:
            arm: name of the arm.
            **conditions: conditions of the row.
        """
        for row in self.rows:
            if row.arm == arm and conditions.items() <= row.conditions.items():
                return row
        return None


class Criterion(Settings):
    """A bound that decoding on a GPU must meet.

    Attributes:
        name: part of the decoder.
        measure: quantity to which the bound applies.
        value: measured value; None without a measurement.
        bound: bound on the value.
        direction: side of the bound on which values are good.
        state: whether the bound is met.
        reason: reason in words if there is no value.
    """

    name: str
    measure: str
    value: float | None = None
    bound: float
    direction: Literal["at most", "at least"] = "at most"
    state: CriterionState
    reason: str | None = None


class Headline(Settings):
    """The main figures.

    Attributes:
        ratio_greedy: tokens per second at tau 3 and temperature 0, with the cost of drafting, over
            those of the fastest autoregressive decoding.
        ratio_sampled: the same at temperature 1.
        waits: number of times per decoding step that the host waits for the GPU.
        launches: number of kernels or graphs that the host launches per decoding step.
        gpu_busy: share of the time in which the GPU is busy.
    """

    ratio_greedy: float | None = None
    ratio_sampled: float | None = None
    waits: float | None = None
    launches: float | None = None
    gpu_busy: float | None = None


class GPUDocument(Settings):
    """Everything that `jakiro profile gpu` stores.

    Attributes:
        version: version of this schema.
        environment: machine, versions, target and settings.
        is_complete: whether all requested sections have ended.
        is_valid: whether no row is invalid.
        sections: results of the sections so far.
        headline: main figures.
        criteria: bounds and measured values.
    """

    version: Literal[1] = 1
    environment: dict[str, Any]
    is_complete: bool
    is_valid: bool
    sections: dict[str, SectionResult]
    headline: Headline
    criteria: tuple[Criterion, ...]


def schema() -> str:
    """Return the JSON schema of the document."""
    return json.dumps(GPUDocument.model_json_schema(), indent=2)
