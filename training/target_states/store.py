"""Reader of target states, which maps shards into memory and reads sequences on demand."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from jakiro.errors import CheckpointError
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import TORCH_DTYPES
from training.loss.normalizers import Normalizers
from training.setup.preparation import RunInputs
from training.target_states.index import (
    NORMALIZERS,
    TargetStateIndex,
    fingerprint_of,
    is_whole,
    read_index,
)
from training.target_states.states import States

_OPEN_SHARDS = 256  # largest number of shards that are mapped at a time

_logger = get_logger(__name__)


class TargetStateStore:
    """Target states of all sequences of a run, read on demand."""

    def __init__(self, folder: Path, index: TargetStateIndex, names: Sequence[str]) -> None:
        self._folder = folder
        self._index = index
        self._names = names
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
        stored = (*self._names, *(NORMALIZERS if self._index.has_normalizers else ()))
        return {name: file.get_slice(name) for name in stored}


def open_target_states(inputs: RunInputs) -> TargetStateStore | None:
    """Return the target states that a run reads, or None if the target runs during training.

    If the source is "available", and the folder lacks states that the drafter reads, the target
    runs. The sizes of all shards are checked; `jakiro prepare states --check` checks their bytes.
    """
    settings = inputs.settings.target_states
    if settings.source == "online" or settings.folder is None:
        return None
    folder = settings.folder.expanduser().absolute()
    index = read_index(folder)
    if index is None:
        raise _unusable(folder, "there is no index")
    wanted = index.model_copy(update={"fingerprint": fingerprint_of(inputs)})
    if (difference := index.difference(wanted)) is not None:
        name, got, expected = difference
        raise CheckpointError(
            f"the target states in {folder} do not belong to this run ({name} differs)",
            expected=expected,
            got=got,
            remedy="set target_states.folder to a folder with states of this target and data, or "
            "write these states with `jakiro prepare states`",
        )
    needed = list(States.needed_by(inputs.drafter_config).widths(inputs.target.spec))
    if missing := [name for name in needed if name not in index.widths]:
        if settings.source == "available":
            _logger.info(f"the target runs, because {folder} lacks {', '.join(missing)}")
            return None
        raise CheckpointError(
            f"the target states in {folder} lack states that this drafter reads",
            expected=", ".join(needed),
            got=", ".join(index.widths),
            remedy="write target states with this drafter's settings",
        )
    _check_shards(folder, index)
    return TargetStateStore(folder, index, needed)


def _check_shards(folder: Path, index: TargetStateIndex) -> None:
    if len(index.shards) < index.num_shards:
        raise _unusable(folder, f"{len(index.shards)} of {index.num_shards} shards are written")
    for shard in index.shards:
        if not is_whole(folder, shard):
            raise _unusable(folder, f"{shard.file} is missing or does not have its full size")


def _unusable(folder: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"the target states in {folder} are incomplete or damaged",
        got=got,
        remedy="run `jakiro prepare states --check` with this configuration and folder",
    )
