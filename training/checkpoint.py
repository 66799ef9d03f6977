"""Checkpoints from which a run goes on exactly as if it had never stopped.

Nothing of a run depends on a global random state: rows, anchors and learning rate are functions of
the seed and the step. So weights, optimizer states and the step are all there is to keep.
"""

import json
import pickle
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jakiro.errors import CheckpointError
from jakiro.files import write_atomically
from training.processes import Processes
from training.run_folder import settle

_STATE = "state.json"
_ENGINE = "engine"  # folder of what DeepSpeed writes


# What reading a damaged file raises.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.PickleError)


@dataclass
class RunState:
    """How far a run has come.

    Attributes:
        step: optimizer steps taken.
        tokens: tokens read, padding not counted.
        seconds: spent on the steps.
        losses: the last record of the losses.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run; all processes act together.

    Args:
        folder: where they lie, one folder for each.
        keep: how many of the latest stay.
        processes: this one among the others.
    """

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self._folder = folder
        self._keep = keep
        self._processes = processes

    def save(self, engine: Any, state: RunState) -> None:
        """Write a checkpoint; an interruption leaves the earlier ones as they are."""
        partial = self._folder / ".partial"
        if self._processes.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._processes.wait()
        engine.save_checkpoint(str(partial), tag=_ENGINE, save_latest=False)
        self._processes.wait()
        if self._processes.is_first:
            facts = asdict(state) | {"num_processes": self._processes.count}
            write_atomically(partial / _STATE, json.dumps(facts))
            settle(partial, self._folder / f"step-{state.step:08d}")
            self._prune()
        self._processes.wait()

    def restore(self, engine: Any) -> RunState:
        """Load the latest checkpoint and return its state; without one, that of a new run.

        Raises:
            CheckpointError: it is damaged, or was written by another number of processes.
        """
        folders = self._finished()
        if not folders:
            return RunState()
        try:
            facts = json.loads((folders[-1] / _STATE).read_bytes())
            self._require_same_count(facts.pop("num_processes"), engine)
            engine.load_checkpoint(str(folders[-1]), tag=_ENGINE)
            return RunState(**facts)
        except _DAMAGE as error:
            raise CheckpointError(
                f"cannot resume from {folders[-1]}",
                expected="a checkpoint as it was written",
                got=repr(error),
                remedy="remove that folder, and the run goes on from the one before",
            ) from error

    def _finished(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def _prune(self) -> None:
        for folder in self._finished()[: -self._keep]:
            shutil.rmtree(folder)

    def _require_same_count(self, recorded: int, engine: Any) -> None:
        if engine.zero_optimization_stage() > 0 and recorded != self._processes.count:
            raise CheckpointError(
                "the checkpoint's optimizer states are shared out over another number of processes",
                expected=f"{recorded} processes",
                got=self._processes.count,
                remedy="resume with as many processes as before",
            )
