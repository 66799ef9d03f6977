"""What a run tells while it goes: JSON lines, TensorBoard scalars, and a progress bar."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jakiro.files import write_atomically

METRICS = "metrics.jsonl"


class Journal:
    """Records of one run, in order; a resumed run takes back what it will do again.

    Args:
        folder: of the run.
        first_step: steps that were done before.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # Takes a second to import; who only evaluates or exports should not wait for it.
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] <= first_step]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None
        )

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Record what is known after `step` steps."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        for name, value in _scalars(record):
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Bring everything to the disk."""
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run; a last line that an interruption cut off is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    whole_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole_lines]


@contextmanager
def progress_bar(given: Progress | None, is_shown: bool) -> Iterator[Progress]:
    """Yield the caller's progress display, or one of our own on standard error."""
    if given is not None:
        yield given
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as progress:
        yield progress


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield nested numbers under names such as `levels/1/token`."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, list):
            value = {str(place): item for place, item in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, value
