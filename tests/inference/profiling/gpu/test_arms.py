"""An arm that fails, is wrong or does not exist does not affect the other arms."""

from inference.profiling.gpu.arms import NotThere, TimedArm, guarded_row, measured_rows
from inference.profiling.gpu.document import Row
from inference.profiling.gpu.scale import QUICK
from jakiro.errors import NumericalError


def _nothing() -> None:
    pass


def _crash() -> TimedArm:
    raise RuntimeError("no kernel\nand a long explanation")


def _crash_later() -> TimedArm:
    def work() -> None:
        raise NumericalError("the logits are not finite")

    return TimedArm(work)


def test_every_arm_has_a_row_with_its_state() -> None:
    rows = measured_rows(
        {
            "good": lambda: TimedArm(_nothing, units=4, remark="a remark", values={"answer": 42}),
            "crashes": _crash,
            "not finite": _crash_later,
            "wrong": lambda: TimedArm(_nothing, fault=lambda: "token 3 is wrong"),
            "missing": NotThere("nobody wrote it"),
        },
        {"context": 5},
        QUICK,
    )
    found = {row.arm: row for row in rows}
    assert [row.state for row in found.values()] == [
        "measured",
        "failed",
        "invalid",
        "invalid",
        "not there yet",
    ]
    good = found["good"]
    assert good.conditions == {"context": 5}
    assert good.number("ms") is not None
    assert good.number("answer") == 42
    assert good.reason == "a remark"
    assert found["crashes"].reason == "RuntimeError: no kernel"
    assert found["wrong"].reason == "token 3 is wrong"
    assert found["wrong"].number("ms") is None  # invalid times are not used
    assert found["missing"].values is None
    assert found["missing"].reason == "nobody wrote it"


def test_an_error_in_a_single_measurement_becomes_its_row() -> None:
    def measure() -> Row:
        raise ValueError("no window")

    row = guarded_row("arm", {"temperature": 1.0}, measure)
    assert row == Row(
        arm="arm",
        conditions={"temperature": 1.0},
        state="failed",
        reason="ValueError: no window",
    )
