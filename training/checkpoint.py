"""Checkpoints from which a run goes on exactly as if it had never stopped.

Nothing of a run depends on a global random state: rows, anchors and learning rate are functions of
the seed and the step. So weights, optimizer states and the step are all there is to keep. They are
kept whole, as safetensors, so a run may go on with another number of processes or ZeRO stage.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from jakiro.errors import CheckpointError, ResourceError
from jakiro.files import settle, write_atomically
from training.engine_state import gather_state, scaler_state, scatter_state, set_scaler_state
from training.failures import writing
from training.processes import Processes

_STATE = "state.json"
_SUFFIX = ".safetensors"

# What reading a damaged file raises.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)


@dataclass
class RunState:
    """How far a run has come.

    Attributes:
        step: optimizer steps taken.
        tokens: tokens read, padding not counted.
        seconds: spent on the steps.
        losses: the last record of the losses.
        best_tau: the highest that an evaluation measured, if one did.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)
    best_tau: float | None = None


class Checkpoints:
    """The checkpoints of one run; all processes act together, the first one writes.

    Args:
        folder: where they lie, one folder for each; all processes see it.
        keep: how many of the latest stay.
        processes: this one among the others.
    """

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self._folder = folder
        self._keep = keep
        self._processes = processes

    def latest(self) -> Path | None:
        """Return the checkpoint from which the run would go on, if there is one."""
        return max(self._finished(), default=None)

    def save(self, engine: Any, state: RunState) -> None:
        """Write a checkpoint; an interruption leaves the earlier ones as they are.

        Raises:
            ResourceError: it cannot be written; the earlier ones are as they were.
        """
        partial = self._folder / ".partial"
        with self._writing(partial) as writes:
            if writes:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        for kind, parts in gather_state(engine, is_kept=self._processes.is_first):
            with self._writing(partial) as writes:
                if writes:
                    save_file(parts, partial / f"{kind}{_SUFFIX}")
        with self._writing(partial) as writes:
            if writes:
                facts = asdict(state) | {"scaler": scaler_state(engine)}
                write_atomically(partial / _STATE, json.dumps(facts))
                settle(partial, self._folder / f"step-{state.step:08d}")
                self._prune()

    def restore(self, engine: Any) -> RunState:
        """Load the latest checkpoint and return its state; without one, that of a new run.

        Raises:
            CheckpointError: it is damaged.
        """
        folder = self.latest()
        if folder is None:
            return RunState()
        with self._processes.together(), _reading(folder):
            facts = json.loads((folder / _STATE).read_bytes())
            kinds = {path.stem: load_file(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))}
        with self._processes.together(), _reading(folder):
            scatter_state(engine, kinds)
            set_scaler_state(engine, facts.pop("scaler"))
            return RunState(**facts)

    def _finished(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def _prune(self) -> None:
        removed = self._folder / ".removed"
        for folder in self._finished()[: -self._keep]:
            shutil.rmtree(removed, ignore_errors=True)
            folder.rename(removed)  # else an interruption would leave a part that looks finished
        shutil.rmtree(removed, ignore_errors=True)

    @contextmanager
    def _writing(self, partial: Path) -> Iterator[bool]:
        """Yield whether this process writes; where that fails, nothing is left of the attempt."""
        try:
            with writing("a checkpoint", self._folder, self._processes) as is_writing:
                yield is_writing
        except ResourceError:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise CheckpointError(
            f"cannot resume from {folder}",
            expected="a checkpoint as it was written",
            got=repr(error),
            remedy="remove that folder, and the run goes on from the one before",
        ) from error
