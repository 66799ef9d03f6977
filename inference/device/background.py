"""A call that may take long, in a thread of its own."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A function that runs in another thread, which does not keep the process alive.

    Args:
        function: function to call.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._is_done = Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        Thread(target=self._run, daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the call, and return whether it has ended.

        Args:
            seconds: longest time to wait; None for any time.
        """
        return self._is_done.wait(seconds)

    @property
    def is_done(self) -> bool:
        """Whether the call has ended."""
        return self._is_done.is_set()

    def result(self) -> T:
        """Return the result of a call that has ended, or raise its exception."""
        assert self.is_done, "wait first"
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        finally:
            self._is_done.set()
