"""A function that the engine's thread runs for another thread."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class EngineCall(Generic[T]):
    """A function that runs at most once, and the future of its result.

    Args:
        function: function without arguments.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self) -> None:
        """Run the function, unless its future was cancelled; an exception is its result, too."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """End the call without running the function.

        Args:
            error: exception that its future raises.
        """
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
