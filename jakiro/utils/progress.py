"""Progress of long work on standard error: bars in a terminal, lines in a log file."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import inf
from threading import Event, Lock, Thread
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

# Function that receives the name and the number of steps of a part of the work (None if it is
# unknown), and returns a function that is called after each step.
Track = Callable[[str, int | None], Callable[[], None]]
INTERVAL = 30.0  # seconds between two lines about the same task in a log file


class _LabelledTime(ProgressColumn):
    """The elapsed or the remaining time, with the word that says which."""

    max_refresh = 0.5

    def __init__(self, seconds_of: Callable[[Task], float | None], label: str) -> None:
        super().__init__()
        self._seconds_of = seconds_of
        self._label = label

    def render(self, task: Task) -> RenderableType:
        """Return the time and its label."""
        seconds = self._seconds_of(task)
        time = "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
        return Text.assemble((time, "progress.elapsed"), " ", self._label)


def seconds_left(task: Task) -> float | None:
    """Estimate the time that a task still takes, from its mean speed since its start.

    Batches complete many steps at the same moment, so the speed of the last seconds says little.
    The first steps of a batch say as little, because most of the work so far is in the others.

    Args:
        task: the task; its field `begun`, if it has one, is the number of steps that were complete
            when its clock started, and its field `batch_size` the number of steps in progress at
            the same time.

    Returns:
        Seconds; None if the number of steps is unknown, or if fewer steps than those of a batch
        have been completed since the start.
    """
    steps = task.completed - task.fields.get("begun", 0)
    if task.total is None or task.elapsed is None or steps < task.fields.get("batch_size", 1):
        return None
    return max(task.total - task.completed, 0) * task.elapsed / steps


def _elapsed(task: Task) -> float | None:
    return task.finished_time if task.finished else task.elapsed


ELAPSED = _LabelledTime(_elapsed, "elapsed")
COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    ELAPSED,
    _LabelledTime(seconds_left, "left"),
)
# These columns need tasks with a text in the field `rate`.
COLUMNS_WITH_RATE = (*COLUMNS[:-2], TextColumn("{task.fields[rate]}"), *COLUMNS[-2:])


class ProgressDisplay(Progress):
    """A progress display of rich; without a terminal, it writes a line every half minute.

    Without a terminal, tasks that end within the first half minute write nothing. Between `start`
    and `stop`, lines are also written while no task makes progress.
    """

    def __init__(
        self, *columns: ProgressColumn | str, console: Console | None = None, is_shown: bool = True
    ) -> None:
        console = console or Console(stderr=True)
        is_bar = is_shown and console.is_terminal
        super().__init__(*(columns or COLUMNS), console=console, disable=not is_bar)
        self._writes_lines = is_shown and not is_bar
        self._due: dict[TaskID, float] = {}  # time of the next line
        self._writing = Lock()
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
        """Stop the display, as in rich; no line is written afterwards unless a task advances."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.join()
        super().stop()

    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        """Add a task, as in rich."""
        fields.setdefault("begun", fields.get("completed", 0))
        task_id = super().add_task(description, *arguments, **fields)
        self._due[task_id] = time.monotonic() + INTERVAL
        return task_id

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Change the state of a task, as in rich."""
        super().update(task_id, **fields)
        self._write_line(task_id)

    def advance(self, task_id: TaskID, advance: int | float = 1) -> None:
        """Add to the number of completed steps of a task, as in rich."""
        super().advance(task_id, advance)
        self._write_line(task_id)

    def _write_regularly(self) -> None:
        while not self._stopped.wait(INTERVAL / 4):
            for task in self.tasks:
                if not task.finished:
                    self._write_line(task.id)

    def _write_line(self, task_id: TaskID) -> None:
        if not self._writes_lines:
            return
        with self._writing:
            now = time.monotonic()
            if now >= self._due.get(task_id, inf):
                self._due[task_id] = now + INTERVAL
                self.console.print(line_of(self._tasks[task_id]), highlight=False, soft_wrap=True)


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
def writing_progress(
    description: str, total: int, batch_size: int
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of generated records on standard error, with tokens per second.

    Args:
        total: number of records at the end.

    Yields:
        A function that receives the number of finished records and the number of tokens that have
        been generated so far. While there are no tokens, the records are those of earlier runs.
    """
    with ProgressDisplay(*COLUMNS_WITH_RATE) as display:
        task = display.add_task(description, total=total, rate="", batch_size=batch_size)

        def advance(records: int, tokens: int) -> None:
            if not tokens:
                display.reset(
                    task, completed=records, rate="", begun=records, batch_size=batch_size
                )
            seconds = display.tasks[task].elapsed or 0
            rate = f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
            display.update(task, completed=records, rate=rate)

        yield advance


def line_of(task: Task) -> str:
    """Return the progress of a task in words.

    Args:
        task: the task; the text of its field `rate`, if it has one, is part of the line.
    """
    done = f"{task.completed:,.0f}"
    parts = [f"{done} of {task.total:,.0f}" if task.total is not None else done]
    if rate := task.fields.get("rate"):
        parts.append(str(rate))
    parts.append(f"{_minutes(task.elapsed)} elapsed")
    if (left := seconds_left(task)) is not None and not task.finished:
        parts.append(f"about {_minutes(left)} left")
    return f"{task.description}: {', '.join(parts)}"


def _minutes(seconds: int | float | None) -> str:
    whole = int(seconds or 0)
    return f"{whole // 60}:{whole % 60:02d}"
