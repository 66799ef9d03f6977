"""The folder of a run: its record, checkpoints, best drafter, and finished drafter."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import write_provenance
from jakiro.utils.settings import flattened
from training.config import TrainSettings

_logger = get_logger(__name__)

# Settings that do not change a run's result: paths, intervals of records and checkpoints,
# evaluation, the device, and the use of memory. The target, the data and the drafter of a warm
# start are compared by their fingerprints instead, and `data.split` by `sequences_filled_with`.
_FREE: Any = {
    "run_folder": True,
    "checkpoint": True,
    "log_every": True,
    "evaluation": True,
    "target": {"name_or_path"},
    "initialize": {"drafter"},
    "data": {"paths", "cache_folder", "split"},
    "target_states": {"folder"},
    "batch": {"micro_batch_size"},
    "objective": {"chunk_size"},
    "engine": {
        *("device", "zero_stage", "activation_checkpointing"),
        *("offload_optimizer", "offload_parameters"),
    },
}

LENGTH = ("steps", "epochs", "minutes")  # settings that may be raised to continue a run


def run_fingerprint(settings: TrainSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings and fingerprints that determine a run's result."""
    return {"settings": settings.model_dump(mode="json", exclude=_FREE), **facts}


def difference(
    recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return the name and both values of the first difference; None if there is no difference."""
    then, now = _named(recorded), _named(wanted)
    names = sorted(then.keys() | now.keys())
    triples = ((name, then.get(name), now.get(name)) for name in names)
    return next((triple for triple in triples if triple[1] != triple[2]), None)


def is_longer(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether the wanted run continues the recorded run with more steps."""
    before, now = _named(recorded), _named(wanted)
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    is_more = ((now.get(name) or math.inf) >= (before.get(name) or math.inf) for name in LENGTH)
    return bool(changed) and changed <= {*LENGTH} and all(is_more)


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("settings."): value for key, value in flattened(values)}


class RunFolder:
    """The folder of one run; other runs cannot overwrite its results."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def drafter(self) -> Path:
        """The folder of the finished drafter, which exists in full or not at all."""
        return self.path / "drafter"

    @property
    def best(self) -> Path:
        """The folder of the best drafter so far; a link within the run folder."""
        return self.path / "best"

    @property
    def adapter(self) -> Path:
        """The folder of the separate adapters, if the drafter was trained with adapters."""
        return self.path / "adapter"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_finished(self) -> bool:
        return self.drafter.is_dir()

    def is_finished_for(self, settings: TrainSettings, facts: Mapping[str, str]) -> bool:
        """Return whether the run is finished and these settings do not continue it."""
        return self.is_finished and not self._is_continued(settings, facts)

    @property
    def best_state(self) -> dict[str, Any] | None:
        """The run's state when the drafter in `best` was kept; None if there is no such drafter."""
        if not self.best.exists():
            return None
        state: dict[str, Any] = record_of(self.best)["training"]
        return state

    @property
    def holds_work(self) -> bool:
        """Whether the folder contains results: a checkpoint, `best` or the finished drafter."""
        return self.is_finished or self.best.exists() or self._has_checkpoint

    @property
    def _has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*"))

    @contextmanager
    def claim(self, settings: TrainSettings, facts: Mapping[str, str]) -> Iterator[None]:
        """Lock the folder for this run, so that no other process trains in the folder.

        A folder that contains only the settings of an earlier run may be claimed by any run. A
        finished run may be continued with more steps; the folder of its drafter is then renamed.
        """
        ensure_writable_folder(self.path)
        try:
            with FileLock(self.path / ".lock", timeout=0):
                self._take_over(settings, facts)
                yield
        except Timeout as error:
            raise ConfigError(
                f"another process is training in {self.path}",
                expected="a separate run_folder for each run",
                got="a locked folder",
                remedy="wait for that process to end, or choose another run_folder",
            ) from error

    def check(self, settings: TrainSettings, facts: Mapping[str, str]) -> None:
        """Raise an error if the folder belongs to another run."""
        if not self.holds_work:
            return
        changed = difference(self._read_record(), run_fingerprint(settings, facts))
        if changed is not None and not self._is_continued(settings, facts):
            name, expected, got = changed
            raise ConfigError(
                f"the run folder {self.path} holds a run with other settings ({name} differs)",
                expected=expected,
                got=got,
                remedy="choose another run_folder, or use the settings in its config.yaml"
                + (", or a higher value" if name in LENGTH and self._has_checkpoint else ""),
            )

    def _take_over(self, settings: TrainSettings, facts: Mapping[str, str]) -> None:
        """Check the folder, and write the settings of the run to it unless it has them."""
        self.check(settings, facts)
        if self._is_continued(settings, facts):
            self._reopen()
        elif self._record.exists() and self.holds_work:
            return
        write_provenance(self.path, settings)
        write_atomically(self._record, json.dumps(run_fingerprint(settings, facts), indent=2))

    def _is_continued(self, settings: TrainSettings, facts: Mapping[str, str]) -> bool:
        """Return whether this run adds steps to the recorded run, which has a checkpoint."""
        if not (self._has_checkpoint and self._record.exists()):
            return False
        return is_longer(self._read_record(), run_fingerprint(settings, facts))

    def _reopen(self) -> None:
        """Rename the finished drafter, if there is one, because the run continues."""
        _logger.info(f"the run in {self.path} continues from its last checkpoint with more steps")
        if not self.is_finished:
            return
        renamed = self.path / f"drafter-after-{record_of(self.drafter)['training']['step']}-steps"
        shutil.rmtree(renamed, ignore_errors=True)  # it may be left from an earlier attempt
        self.drafter.rename(renamed)
        _logger.info(f"the drafter of the shorter run is now in {renamed}")

    @property
    def _record(self) -> Path:
        return self.path / "run.json"

    def _read_record(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(self._record.read_bytes())
            if not isinstance(record["settings"], dict):
                raise TypeError("settings that are not an object")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the record of the run in {self.path} is missing or damaged",
                expected="the file run.json as training wrote it",
                got=f"{type(error).__name__}: {error}",
                remedy="restore this file, choose another run_folder, or delete this folder and "
                "train again",
            ) from error
        return record


def record_of(drafter: Path) -> dict[str, Any]:
    """Return the record of a drafter's training, with the `RunState` when it was written."""
    record: dict[str, Any] = json.loads((drafter / "config.json").read_bytes())["record"]
    return record
