"""A call in the background ends with its result or its exception."""

from threading import Event

import pytest

from inference.device.background import BackgroundCall


def test_the_result_arrives_when_the_call_has_ended() -> None:
    may_end = Event()

    def function() -> int:
        may_end.wait(10)
        return 3

    call = BackgroundCall(function)
    assert not call.wait(0.0)
    assert not call.is_done
    may_end.set()
    assert call.wait()
    assert (call.is_done, call.result()) == (True, 3)


def test_an_exception_is_raised_where_the_result_is_read() -> None:
    def function() -> int:
        raise ValueError("a reason")

    call = BackgroundCall(function)
    assert call.wait(10.0)
    with pytest.raises(ValueError, match="a reason"):
        call.result()
