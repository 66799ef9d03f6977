"""A call in the background ends with its result or its exception."""

from threading import Event

from jakiro.utils.background import in_background


def test_the_result_arrives_when_the_call_has_ended() -> None:
    may_end = Event()

    def function() -> int:
        may_end.wait(10)
        return 3

    call = in_background(function)
    assert not call.done()
    may_end.set()
    assert call.result(10.0) == 3
