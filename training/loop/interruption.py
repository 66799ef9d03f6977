"""Handling of signals that ask a run to end; the run saves its state first."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from jakiro.utils.logs import get_logger
from training.distributed.processes import Processes

_logger = get_logger(__name__)


class Interruption:
    """Receives SIGINT (Ctrl-C) and SIGTERM within a `with` block.

    The first signal is only recorded, so that the run can save its state at the end of a step. A
    second SIGINT raises KeyboardInterrupt at once. In threads other than the main thread, which
    receive no signals, the block does nothing.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._is_requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        """Begin to receive signals."""
        if threading.current_thread() is threading.main_thread():
            received: dict[int, Callable[[int, FrameType | None], None]] = {
                signal.SIGINT: self._interrupt,
                signal.SIGTERM: self._note,
            }
            self._before = {name: signal.signal(name, act) for name, act in received.items()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the earlier handlers."""
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def is_requested(self, *, waits: bool) -> bool:
        """Return whether any process received a signal; all processes get the same answer.

        Args:
            waits: whether the processes may wait for each other. If not, the answer is False for a
                run of several processes.
        """
        if self._processes.count > 1 and not waits:
            return False
        return any(self._processes.gather(self._is_requested))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_requested:
            raise KeyboardInterrupt
        if self._processes.is_first:
            _logger.warning(
                "the run will end after a complete step; press Ctrl-C again to end it at once"
            )
        self._note(number, frame)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_requested = True
