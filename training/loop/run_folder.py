"""The folder of a run: whose it is, how far it came, and what it leaves behind."""

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jakiro.config import JakiroConfig
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, publish, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import write_provenance
from jakiro.utils.settings import flattened
from training.config import TrainSettings
from training.loop.model_card import model_card
from training.setup.adapters import save_adapters

# What does not change a run's result: where things lie, how often progress is kept, how it is
# measured on the way, and what is in which memory at a time. Data, target and the drafter that
# another one starts from are compared by fingerprint instead.
_FREE: Any = {
    "run_folder": True,
    "checkpoint": True,
    "log_every": True,
    "evaluation": True,
    "target": {"name_or_path"},
    "initialize": {"drafter"},
    "data": {"paths", "cache_folder", "split"},  # what is split is a fact where it matters
    "features": {"folder"},
    "batch": {"micro_batch_size"},
    "objective": {"chunk_size"},
    "engine": {
        *("device", "zero_stage", "activation_checkpointing"),
        *("offload_optimizer", "offload_parameters"),
    },
}


_OPTIONAL = {"start_fingerprint"}  # of a drafter to start from, which not every run has


def run_fingerprint(settings: TrainSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides a run's result.

    Args:
        settings: of the run.
        facts: fingerprints of the target and the data.
    """
    return {"settings": settings.model_dump(mode="json", exclude=_FREE), **facts}


def difference(
    recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return the name of the first thing that makes another run, and both values; or None.

    Args:
        recorded: the identity of a run.
        wanted: that of another one.
    """
    then, now = _named(recorded), _named(wanted)
    names = sorted(then.keys() | now.keys())
    found = ((name, then.get(name), now.get(name)) for name in names)
    return next((one for one in found if one[1] != one[2]), None)


def unmatched(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the first name that only one of two identities has, as their formats differ; or None.

    A group that is None in one of them, such as `lora`, is a difference in value, not in format.

    Args:
        recorded: the identity of a run.
        wanted: that of another one.
    """
    for name in sorted((recorded.keys() | wanted.keys()) - _OPTIONAL):
        if name not in recorded or name not in wanted:
            return name
        then, now = recorded[name], wanted[name]
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            inner = unmatched(then, now)
            if inner is not None:
                return f"{name}.{inner}".removeprefix("settings.")
    return None


def way_to_repeat(name: str, recorded: Any) -> str:
    """Return how to have again what the record of a run says.

    Args:
        name: of what differs.
        recorded: its value there; None if there is none.
    """
    if name == "rows_filled_with":
        return f"set data.split: {str(recorded).removeprefix('split ')}, as its rows were made"
    return "repeat the settings in its config.yaml"


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("settings."): value for key, value in flattened(values)}


_logger = get_logger(__name__)


class RunFolder:
    """Keeps one run; another run's results are never overwritten.

    Args:
        path: the folder; it is created when claimed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def drafter(self) -> Path:
        """Where the finished drafter lies; it exists in full or not at all."""
        return self.path / "drafter"

    @property
    def best(self) -> Path:
        """Where the drafter with the highest tau so far lies; a link to a folder beside it."""
        return self.path / "best"

    @property
    def adapter(self) -> Path:
        """Where its adapters lie by themselves, if it was trained with any."""
        return self.path / "adapter"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.drafter.is_dir()

    @property
    def best_tau(self) -> float | None:
        """The tau of `best`; None without one."""
        if not self.best.exists():
            return None
        record: dict[str, Any] = JakiroConfig.from_pretrained(self.best).record or {}
        found: float | None = record.get("training", {}).get("best_tau")
        return found

    @property
    def holds_work(self) -> bool:
        """Whether anything of the run would be lost: a checkpoint, `best` or the drafter."""
        return self.is_finished or self.best.exists() or any(self.checkpoints.glob("step-*"))

    @contextmanager
    def claim(self, settings: TrainSettings, facts: Mapping[str, str]) -> Iterator[None]:
        """Own the folder for this run, while no other process trains in it.

        A run that left nothing but its settings gives way to any other one.

        Args:
            settings: of the run; kept in `config.yaml`.
            facts: fingerprints of the target and the data.

        Raises:
            ConfigError: the folder is not writable, in use, or belongs to another run.
        """
        ensure_writable_folder(self.path)
        try:
            with FileLock(self.path / ".lock", timeout=0):
                self._check_or_found(settings, facts)
                yield
        except Timeout as error:
            raise ConfigError(
                f"another process is training in {self.path}",
                expected="a run folder of its own for each run",
                got="a lock",
                remedy="wait for it, or choose another run_folder",
            ) from error

    def check(self, settings: TrainSettings, facts: Mapping[str, str]) -> None:
        """Check that the folder is this run's, or nobody's yet; arguments are those of `claim`.

        Raises:
            ConfigError: it belongs to another run, or its record has another format.
        """
        if not self.holds_work:
            return
        self._check_format(settings, facts)
        found = self._difference(settings, facts)
        if found is not None:
            name, expected, got = found
            raise ConfigError(
                f"the run folder {self.path} holds a run with other settings ({name} differs)",
                expected=expected,
                got=got,
                remedy=f"choose another run_folder, or {way_to_repeat(name, expected)}",
            )

    def keep_adapters(self, drafter: JakiroDrafter, base: str) -> None:
        """Write the adapters of a drafter by themselves; see `save_adapters`."""
        partial = self.path / ".adapter.partial"
        shutil.rmtree(partial, ignore_errors=True)
        save_adapters(drafter, partial, base)
        shutil.rmtree(self.adapter, ignore_errors=True)  # of a run that ended before its drafter
        publish(partial, self.adapter)

    def publish(self, drafter: JakiroDrafter, tokenizer: Any) -> Path:
        """Write the finished drafter with its tokenizer and its model card, in full or not at all.

        What the card says is taken from the drafter's record.
        """
        publish(self._export(drafter, tokenizer), self.drafter)
        return self.drafter

    def keep_best(self, drafter: JakiroDrafter, tokenizer: Any) -> Path:
        """Let `best` be this drafter with its tokenizer; at any moment it is one or the other."""
        folder = self.path / f".best-{uuid.uuid4().hex}"
        publish(self._export(drafter, tokenizer), folder)
        # A folder that is not empty cannot be replaced by renaming; a link to it can.
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
        if self._record.exists() and self.holds_work:
            return
        if (found := self._difference(settings, facts)) is not None:
            name, before, now = found
            _logger.info(
                f"{self.path} holds no checkpoint of an earlier run with other settings, and "
                f"becomes this one's ({name} was {before}, is {now})"
            )
        write_provenance(self.path, settings)
        write_atomically(self._record, json.dumps(run_fingerprint(settings, facts), indent=2))

    def _check_format(self, settings: TrainSettings, facts: Mapping[str, str]) -> None:
        """Refuse a record that does not have the same names as one written today."""
        if not self._record.exists():
            return
        name = unmatched(json.loads(self._record.read_text()), run_fingerprint(settings, facts))
        if name is not None:
            raise ConfigError(
                f"the record of the run in {self.path} has another format",
                expected="a run.json with the same names as one written today",
                got=f"{name} in one of the two alone",
                remedy="choose another run_folder, or delete this one and train again",
            )

    @property
    def _record(self) -> Path:
        return self.path / "run.json"

    def _difference(
        self, settings: TrainSettings, facts: Mapping[str, str]
    ) -> tuple[str, Any, Any] | None:
        """Return the first thing that is not as in the folder's record, and both values."""
        if not self._record.exists():
            return None
        return difference(json.loads(self._record.read_text()), run_fingerprint(settings, facts))
