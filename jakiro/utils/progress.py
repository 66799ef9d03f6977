"""Long work: in a thread in the background, and its progress on standard error.

Progress is shown as bars in a terminal, and as lines in a log file.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")
# Function that receives the name and the number of steps of a part of the work (None if it is
# unknown), and returns a function that is called after each step.
Track = Callable[[str, int | None], Callable[[], None]]
INTERVAL = 30.0  # seconds between two lines about a task in a log file


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process alive, unlike those of executors.

    Its exception is raised where the result is read.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("elapsed"),
    TimeRemainingColumn(),
    TextColumn("left"),
)
# These columns need tasks with a text in the field `rate`.
COLUMNS_WITH_RATE = (*COLUMNS[:3], TextColumn("{task.fields[rate]}"), *COLUMNS[3:])


class ProgressDisplay(Progress):
    """A progress display of rich; without a terminal, it writes lines about unfinished tasks."""

    def __init__(
        self, *columns: ProgressColumn | str, console: Console | None = None, is_shown: bool = True
    ) -> None:
        console = console or Console(stderr=True)
        is_bar = is_shown and console.is_terminal
        # Batches complete many steps at the same moment, so the mean speed since the start counts.
        options: dict[str, Any] = {"console": console, "speed_estimate_period": math.inf}
        super().__init__(*(columns or COLUMNS), **options, disable=not is_bar)
        self._writes_lines = is_shown and not is_bar
        self._stopped = Event()
        self._writer: Thread | None = None

    def start(self) -> None:
        """Start the display, as in rich."""
        super().start()
        if self._writes_lines:
            self._stopped.clear()
            self._writer = Thread(target=self._write_regularly, daemon=True)
            self._writer.start()

    def stop(self) -> None:
        """Stop the display, as in rich."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.join()
        super().stop()

    def _write_regularly(self) -> None:
        while not self._stopped.wait(INTERVAL):
            for task in self.tasks:
                if not task.finished:
                    self.console.print(line_of(task), highlight=False, soft_wrap=True)


def untracked(description: str, total: int | None) -> Callable[[], None]:
    """Return a function that does nothing; a `Track` for work whose progress is not shown."""
    return lambda: None


def tracked(progress: Progress) -> Track:
    """Return a function that adds a task and returns a function that advances it by a step."""

    def track(description: str, total: int | None) -> Callable[[], None]:
        task = progress.add_task(description, total=total)
        return partial(progress.advance, task)

    return track


@contextmanager
def writing_progress(description: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of generated records on standard error, with tokens per second.

    Args:
        total: number of records at the end.

    Yields:
        A function that receives the number of finished records and the number of tokens that have
        been generated so far. While there are no tokens, the records are those of earlier runs.
    """
    with ProgressDisplay(*COLUMNS_WITH_RATE) as display:
        task = display.add_task(description, total=total, rate="")

        def advance(records: int, tokens: int) -> None:
            if not tokens:
                display.reset(task, completed=records, rate="")
            seconds = display.tasks[task].elapsed or 0
            rate = f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
            display.update(task, completed=records, rate=rate)

        yield advance


def line_of(task: Task) -> str:
    """Return the progress of a task in words; the text of its field `rate` is part of them."""
    done = f"{task.completed:,.0f}"
    parts = [f"{done} of {task.total:,.0f}" if task.total is not None else done]
    if rate := task.fields.get("rate"):
        parts.append(str(rate))
    parts.append(f"{_minutes(task.elapsed)} elapsed")
    if task.time_remaining is not None and not task.finished:
        parts.append(f"about {_minutes(task.time_remaining)} left")
    return f"{task.description}: {', '.join(parts)}"


def _minutes(seconds: float | None) -> str:
    whole = int(seconds or 0)
    return f"{whole // 60}:{whole % 60:02d}"
