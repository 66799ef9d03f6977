"""Reader of target states, which maps shards into memory and reads sequences on demand."""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from safetensors import safe_open
from torch import Tensor

from jakiro.errors import CheckpointError
from jakiro.utils.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import TORCH_DTYPES
from training.loss.heads import keeps_logits
from training.loss.normalizers import Normalizers
from training.setup.preparation import RunInputs
from training.target_states.index import (
    NORMALIZERS,
    Shard,
    TargetStateIndex,
    fingerprint_of,
    is_intact,
    is_whole,
    read_index,
    ways_to_repeat,
)
from training.target_states.states import States, needs_normalizers

_OPEN_SHARDS = 256  # largest number of shards that are mapped at a time

_logger = get_logger(__name__)


class TargetStateStore:
    """Target states of all sequences of a run, read on demand."""

    def __init__(self, folder: Path, index: TargetStateIndex, names: Sequence[str]) -> None:
        self._folder = folder
        self._index = index
        self._names = names
        self._stored = (*names, *(NORMALIZERS if index.has_normalizers else ()))
        self._opened = lru_cache(maxsize=_OPEN_SHARDS)(self._open)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored parts, except for normalizers."""
        return TORCH_DTYPES[self._index.fingerprint.dtype]

    def read(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Return each part of the given sequences, [sequences, length, width]."""
        return self._read(self._names, numbers)

    def normalizers(self, numbers: Iterable[int]) -> Normalizers | None:
        """Return the normalizers of the target's distributions; None if they are not stored."""
        if not self._index.has_normalizers:
            return None
        stored = self._read(tuple(NORMALIZERS), numbers)
        return Normalizers(stored["log_sum"], stored["best"].long())

    def _read(self, names: Sequence[str], numbers: Iterable[int]) -> dict[str, Tensor]:
        places = [divmod(number, self._index.sequences_per_shard) for number in numbers]
        slices = [(self._opened(shard), index) for shard, index in places]
        return {name: torch.stack([of[name][index] for of, index in slices]) for name in names}

    def _open(self, number: int) -> dict[str, Any]:
        file = safe_open(self._folder / self._index.shards[number].file, framework="pt")
        return {name: file.get_slice(name) for name in self._stored}


def open_target_states(inputs: RunInputs) -> TargetStateStore | None:
    """Return the target states that a run reads, or None if the target runs during training.

    If the source is "available", and the folder lacks states that the drafter reads, the target
    runs. The sizes of all shards are checked. The checksum of a shard is verified only if this
    machine has not verified it since the shard was last written.
    """
    settings = inputs.settings.target_states
    if settings.source == "online" or settings.folder is None:
        return None
    folder = settings.folder.expanduser().absolute()
    index = read_index(folder)
    if index is None:
        raise _unusable(folder, "a shard index", "no index")
    needed = list(States.needed_by(inputs.drafter_config).widths(inputs.target.spec))
    _check_fingerprint(folder, index, inputs)
    if settings.source == "available" and (missing := index.missing(needed)):
        _logger.info(f"the target runs, because {folder} lacks {', '.join(missing)}")
        return None
    _check_parts(folder, index, needed)
    _check_shards(folder, index)
    needs_them = needs_normalizers(inputs.drafter_config, inputs.target.head)
    needs_them &= keeps_logits(inputs.settings.objective.token_temperature)
    if needs_them and not index.has_normalizers:
        _logger.info(
            f"{folder} lacks the normalizers of the target's distributions, because it was written "
            "for a drafter without a draft vocabulary or by an earlier version; steps would take "
            "less time with states that are written again into another folder"
        )
    _check_bytes_once(folder, index.shards, inputs.settings.data.cache_folder)
    return TargetStateStore(folder, index, needed)


def _check_fingerprint(folder: Path, index: TargetStateIndex, inputs: RunInputs) -> None:
    difference = index.fingerprint.difference(fingerprint_of(inputs))
    if difference is not None:
        name, got, expected = difference
        raise CheckpointError(
            f"the target states in {folder} do not belong to this run ({name} differs)",
            expected=expected,
            got=got,
            remedy=f"{ways_to_repeat(name, str(got))}set target_states.folder to a folder with "
            "states of this target and data, or write these states with `jakiro features`",
        )


def _check_parts(folder: Path, index: TargetStateIndex, needed: Iterable[str]) -> None:
    if index.missing(needed):
        raise CheckpointError(
            f"the target states in {folder} lack states that this drafter reads",
            expected=", ".join(needed),
            got=", ".join(index.widths),
            remedy="write target states with this drafter's settings",
        )


def _check_shards(folder: Path, index: TargetStateIndex) -> None:
    if len(index.shards) < index.num_shards:
        expected, got = f"{index.num_shards} shards", str(len(index.shards))
        raise _unusable(folder, expected, got)
    for shard in index.shards:
        if not is_whole(folder, shard):
            path = folder / shard.file
            got = f"{path.stat().st_size:,} bytes" if path.is_file() else "no such file"
            raise _unusable(folder, f"{shard.num_bytes:,} bytes in {shard.file}", got)


def _check_bytes_once(folder: Path, shards: Iterable[Shard], cache_folder: Path | None) -> None:
    """Verify the checksums of shards that this machine has not verified since they were written."""
    cache = ensure_writable_folder(cache_folder or user_cache_path("jakiro") / "features")
    record = cache / f"features-{fingerprint(str(folder))[:32]}.json"
    with FileLock(record.with_suffix(".lock")):
        known = _read_record(record)
        found = {shard.file: _state_of(folder, shard) for shard in shards}
        new = [shard for shard in shards if known.get(shard.file) != found[shard.file]]
        if new:
            _logger.info(f"verifying the checksums of {len(new):,} shards in {folder}")
        for shard in new:
            if not is_intact(folder, shard):
                raise _unusable(folder, f"the original bytes of {shard.file}", "different bytes")
        write_atomically(record, json.dumps(found))


def _state_of(folder: Path, shard: Shard) -> list[Any]:
    """Return values that change whenever the file of a shard is written."""
    status = (folder / shard.file).stat()
    return [shard.sha256, status.st_size, status.st_mtime_ns, status.st_ino]


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _unusable(folder: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the target states in {folder} are incomplete or damaged",
        expected=expected,
        got=got,
        remedy="run `jakiro features --check` with this configuration and folder; this command "
        "writes missing and damaged shards again",
    )
