"""A model that is loaded in a thread of its own, while the server already answers."""

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Loading(Generic[T]):
    """The result of a function that a thread runs.

    The thread does not keep the process alive, so that a signal ends the server while it is still
    loading.

    Args:
        load: function that returns the result.
    """

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="jakiro-load", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or raised an exception."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return the result of the function, which is done, or raise its exception."""
        if self._error is not None:
            raise self._error
        (found,) = self._results
        return found

    def _run(self) -> None:
        try:
            self._results.append(self._load())
        except BaseException as error:  # noqa: BLE001 - `result` raises it again
            self._error = error
