"""Arms of a measurement: functions that are timed in turn, and whose results are checked."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.benchmark.stats import median_interval
from inference.benchmark.timing import Work, interleaved, repeated
from inference.profiling.gpu.document import Conditions, Row, RowState, Value
from inference.profiling.gpu.scale import Scale
from jakiro.errors import NumericalError


def no_fault() -> str | None:
    """Return None: there is nothing to check."""
    return None


@dataclass
class TimedArm:
    """Work to be timed, and the check of its results.

    Attributes:
        work: function that is called repeatedly.
        units: number of tokens, steps or calls by which the time of `work` is divided.
        fault: function that returns why the results are wrong, or None; called after all timing.
        values: function that returns further values of the row; called after `fault`.
        remark: remark on the row; None without one.
    """

    work: Work
    units: int = 1
    fault: Callable[[], str | None] = no_fault
    values: dict[str, Value] = field(default_factory=dict)
    remark: str | None = None


class NotThere(NamedTuple):
    """An arm that the code does not have yet; a builder takes its place as soon as it has."""

    reason: str


Builder = Callable[[], TimedArm]


def measured_rows(
    arms: Mapping[str, Builder | NotThere], conditions: Conditions, scale: Scale
) -> Iterator[Row]:
    """Yield a row for each arm; the arms that can be measured are timed in turn.

    An arm that raises an error gets a row with this error, and the other arms are still measured.

    Args:
        arms: for each arm, a function that prepares it, or the reason why there is none.
        conditions: conditions of all rows.
        scale: numbers of repetitions.
    """
    ready: dict[str, TimedArm] = {}
    rows: dict[str, Row] = {}
    for name, builder in arms.items():
        if isinstance(builder, NotThere):
            rows[name] = absent_row(name, conditions, builder)
            continue
        try:
            ready[name] = builder()
            repeated(ready[name].work, scale.warm_up)()
        except Exception as error:  # noqa: BLE001 - the other arms are measured all the same
            ready.pop(name, None)
            rows[name] = failed_row(name, conditions, error)
    works = {name: arm.work for name, arm in ready.items()}
    seconds = interleaved(works, scale.repeats, warm_up=0) if works else {}
    for name, arm in ready.items():
        rows[name] = _row(name, conditions, arm, seconds[name])
    yield from (rows[name] for name in arms)


def guarded_row(name: str, conditions: Conditions, measure: Callable[[], Row]) -> Row:
    """Return the row of a measurement, or a row with its error.

    Args:
        name: name of the arm.
        conditions: conditions of the row.
        measure: function that returns the row.
    """
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - the other arms are measured all the same
        return failed_row(name, conditions, error)


def absent_row(name: str, conditions: Conditions, absent: NotThere) -> Row:
    """Return the row of an arm that does not exist yet.

    Args:
        name: name of the arm.
        conditions: conditions of the row.
        absent: reason why the arm does not exist.
    """
    return Row(arm=name, conditions=conditions, state="not there yet", reason=absent.reason)


def failed_row(name: str, conditions: Conditions, error: Exception) -> Row:
    """Return the row of an arm that raised an error; logits that are not finite are invalid.

    Args:
        name: name of the arm.
        conditions: conditions of the row.
        error: the error.
    """
    state: RowState = "invalid" if isinstance(error, NumericalError) else "failed"
    return Row(arm=name, conditions=conditions, state=state, reason=described(error))


def described(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def _row(name: str, conditions: Conditions, arm: TimedArm, seconds: list[float]) -> Row:
    """Return the row of a timed arm."""
    ms = median_interval([1e3 * taken / arm.units for taken in seconds])
    values = {"ms": ms.value, "ms_low": ms.low, "ms_high": ms.high, **arm.values}
    fault = arm.fault()
    state: RowState = "measured" if fault is None else "invalid"
    reason = fault or arm.remark
    return Row(arm=name, conditions=conditions, state=state, reason=reason, values=values)
