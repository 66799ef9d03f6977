"""Errors carry a code for the other end, and say what to do."""

from inference.remote.errors import MessageError, SessionGone, StepConflict


def test_errors_have_codes() -> None:
    conflict = StepConflict("out_of_order", 3, next_step=5)
    assert (conflict.code, conflict.next_step) == ("out_of_order", 5)
    assert "step 3 cannot be submitted" in str(conflict)
    assert "expected: a tree for step 5, or step 4 with the same tree" in str(conflict)
    assert SessionGone().code == "session_gone"
    assert MessageError("cycle", "a message", expected=1, got=2).code == "cycle"
