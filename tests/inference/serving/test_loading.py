"""The result, or the exception, of a function that a thread runs."""

from threading import Event

import pytest
from helpers.raw_http import wait_until

from inference.serving.loading import Loading


def test_the_result_is_there_when_the_function_returns() -> None:
    gate = Event()

    def load() -> int:
        gate.wait()
        return 5

    loading = Loading(load)
    assert not loading.is_done
    gate.set()
    wait_until(lambda: loading.is_done)
    assert loading.result() == 5


def test_an_exception_is_raised_again() -> None:
    error = KeyError("a")

    def load() -> int:
        raise error

    loading = Loading(load)
    wait_until(lambda: loading.is_done)
    with pytest.raises(KeyError) as info:
        loading.result()
    assert info.value is error
