"""Progress of long work on standard error: bars in a terminal, lines in a log file."""

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

INTERVAL = 30.0  # seconds between two lines about the same task in a log file


class ProgressDisplay(Progress):
    """A progress display of rich; without a terminal, it writes a line at most every half minute.

    Without a terminal, tasks that end within the first half minute write nothing.

    Args:
        *columns: columns of the bars; by default description, bar, numbers and times.
        console: console to write to; None for standard error.
        is_shown: whether to write anything.
    """

    def __init__(
        self, *columns: ProgressColumn | str, console: Console | None = None, is_shown: bool = True
    ) -> None:
        console = console or Console(stderr=True)
        default = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        is_bar = is_shown and console.is_terminal
        super().__init__(*(columns or default), console=console, disable=not is_bar)
        self._writes_lines = is_shown and not is_bar
        self._due: dict[TaskID, float] = {}  # time of the next line

    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        """Add a task, as in rich."""
        task_id = super().add_task(description, *arguments, **fields)
        self._due[task_id] = time.monotonic() + INTERVAL
        return task_id

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Change the state of a task, as in rich."""
        super().update(task_id, **fields)
        self._write_line(task_id)

    def advance(self, task_id: TaskID, advance: int | float = 1) -> None:
        """Add to the number of completed steps of a task, as in rich.

        Args:
            task_id: the task.
            advance: number of steps.
        """
        super().advance(task_id, advance)
        self._write_line(task_id)

    def _write_line(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if not self._writes_lines or now < self._due[task_id]:
            return
        self._due[task_id] = now + INTERVAL
        self.console.print(line_of(self._tasks[task_id]), highlight=False, soft_wrap=True)


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
    if task.time_remaining is not None and not task.finished:
        parts.append(f"about {_minutes(task.time_remaining)} left")
    return f"{task.description}: {', '.join(parts)}"


def _minutes(seconds: int | float | None) -> str:
    whole = int(seconds or 0)
    return f"{whole // 60}:{whole % 60:02d}"
