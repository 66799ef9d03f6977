"""Metrics that a run writes as JSON lines and for TensorBoard."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jakiro.utils.files import write_atomically
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

METRICS = "metrics.jsonl"


class MetricsLog:
    """The metrics of one run, in the order of the steps.

    A resumed run drops the metrics of the steps that it repeats.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # This import takes a second, and code that only reads metrics does not need it.
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / METRICS
        # Without a checkpoint, a run starts from the beginning, and repeats even the evaluation
        # before its first step.
        lines = read_metrics(folder) if first_step else []
        kept = [line for line in lines if line["step"] <= first_step]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else 0
        )

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        for name, value in _innermost(record):
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without lines that an interruption left incomplete."""
    path = folder / METRICS
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:
            _logger.warning(f"{path}: left out a damaged line")
    return records


def _innermost(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values under names such as `levels/1/token`."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, list):
            value = {str(number): item for number, item in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from _innermost(value, f"{name}/")
        else:
            yield name, value
