"""Functions that run at most once, in another thread."""

from collections.abc import Callable

import pytest

from inference.serving.engine_call import EngineCall


def test_the_future_has_the_result() -> None:
    call = EngineCall(lambda: 3)
    call.run()
    assert call.future.result(0) == 3


def test_an_exception_is_a_result() -> None:
    def fails() -> None:
        raise ValueError("no")

    call = EngineCall(fails)
    call.run()
    with pytest.raises(ValueError, match="no"):
        call.future.result(0)


def test_the_end_of_the_thread_is_not_swallowed() -> None:
    def ends() -> None:
        raise SystemExit

    call = EngineCall(ends)
    with pytest.raises(SystemExit):
        call.run()
    assert isinstance(call.future.exception(0), SystemExit)


@pytest.mark.parametrize("end", [EngineCall.run, lambda call: call.fail(ValueError())])
def test_a_cancelled_function_does_not_run(end: Callable[[EngineCall[None]], None]) -> None:
    ran: list[int] = []
    call = EngineCall(lambda: ran.append(1))
    call.future.cancel()
    end(call)
    assert not ran
    assert call.future.cancelled()


def test_a_function_that_will_not_run_raises_the_reason() -> None:
    call = EngineCall(lambda: 3)
    call.fail(ValueError("stopped"))
    with pytest.raises(ValueError, match="stopped"):
        call.future.result(0)
