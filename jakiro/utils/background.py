"""A call that may take a long time, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process alive, unlike those of executors.

    Args:
        function: function to call; its exception is raised where the result is read.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
