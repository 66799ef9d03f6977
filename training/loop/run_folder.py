"""The folder of a run: its record, checkpoints, best drafter, and finished drafter."""

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, publish, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import write_provenance
from training.config import TrainSettings
from training.distributed.failures import storing
from training.distributed.run_state import record_of
from training.loop.model_card import model_card
from training.loop.run_fingerprint import (
    LENGTH,
    difference,
    is_longer,
    run_fingerprint,
)
from training.setup.adapters import save_adapters

_ADAPTER = "adapter"  # folder of separate adapters
_LOCK = ".lock"  # file

_logger = get_logger(__name__)


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
        return self.path / _ADAPTER

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
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
        with self._locked():
            self._check_or_found(settings, facts)
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        ensure_writable_folder(self.path)
        try:
            with FileLock(self.path / _LOCK, timeout=0):
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
        found = difference(self._read_record(), run_fingerprint(settings, facts))
        if found is not None and not self._is_continued(settings, facts):
            name, expected, got = found
            raise ConfigError(
                f"the run folder {self.path} holds a run with other settings ({name} differs)",
                expected=expected,
                got=got,
                remedy=f"choose another run_folder, or {_way_to_repeat(name, expected)}"
                + (", or a higher value" if name in LENGTH and self._has_checkpoint else ""),
            )

    def keep_adapters(self, drafter: JakiroDrafter, base: str) -> None:
        """Write the adapters of a drafter separately from its weights; see `save_adapters`."""
        partial = self.path / ".adapter.partial"
        shutil.rmtree(partial, ignore_errors=True)
        save_adapters(drafter, partial, base)
        shutil.rmtree(self.adapter, ignore_errors=True)  # it may be left from an earlier attempt
        publish(partial, self.adapter)

    def publish(self, drafter: JakiroDrafter, tokenizer: Any) -> Path:
        """Write the finished drafter with tokenizer and model card, in full or not at all."""
        publish(self._export(drafter, tokenizer), self.drafter)
        return self.drafter

    def publish_best(self) -> Path:
        """Write the drafter in `best`, with its adapters if it has any, as the finished drafter."""
        if (self.best / _ADAPTER).is_dir():
            self._publish_copy(self.best / _ADAPTER, self.adapter)
        self._publish_copy(self.best, self.drafter)
        return self.drafter

    def _publish_copy(self, source: Path, folder: Path) -> None:
        partial = self.path / f".{folder.name}.partial"
        for old in (partial, folder):  # they may be left from an earlier attempt
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(_ADAPTER))
        publish(partial, folder)

    def keep_best(
        self,
        drafter: JakiroDrafter,
        tokenizer: Any,
        as_trained: JakiroDrafter | None = None,
        base: str = "",
    ) -> Path:
        """Replace `best` with this drafter and its tokenizer in a single step."""
        folder = self.path / f".best-{uuid.uuid4().hex}"
        partial = self._export(drafter, tokenizer)
        if as_trained is not None:
            save_adapters(as_trained, partial / _ADAPTER, base)
        publish(partial, folder)
        # Renaming cannot replace a folder that is not empty, but it can replace a link.
        link = self.path / ".best.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self.best)
        for other in self.path.glob(".best-*"):
            if other != folder:
                shutil.rmtree(other)
        return self.best

    def _export(self, drafter: JakiroDrafter, tokenizer: Any) -> Path:
        partial = self.path / ".drafter.partial"
        shutil.rmtree(partial, ignore_errors=True)
        drafter.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        config: Any = drafter.config
        write_atomically(partial / "README.md", model_card(config))
        return partial

    def _check_or_found(self, settings: TrainSettings, facts: Mapping[str, str]) -> None:
        self.check(settings, facts)
        if self._is_continued(settings, facts):
            self._reopen()
        elif self._record.exists() and self.holds_work:
            return
        elif (found := self._difference(settings, facts)) is not None:
            name, before, now = found
            _logger.info(
                f"{self.path} belonged to an earlier run, which had other settings and left no "
                f"checkpoint; this run takes over the folder ({name} was {before}, is now {now})"
            )
        with storing("the settings of the run", self.path):
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

    def _difference(
        self, settings: TrainSettings, facts: Mapping[str, str]
    ) -> tuple[str, Any, Any] | None:
        """Return the name of the first value that differs from the record, then both values.

        If nothing differs, or if there is no record, return None.
        """
        if not self._record.exists():
            return None
        return difference(self._read_record(), run_fingerprint(settings, facts))

    def _read_record(self) -> dict[str, Any]:
        try:
            record = json.loads(self._record.read_bytes())
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
        found: dict[str, Any] = record
        return found


def _way_to_repeat(name: str, recorded: Any) -> str:
    """Return advice, for an error message, on how to give a run the recorded value."""
    if name == "sequences_filled_with":
        return f"set data.split: {str(recorded).removeprefix('split ')}, as in the recorded run"
    return "use the settings in the config.yaml of that folder"
