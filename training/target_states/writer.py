"""Writing features: the target reads every packed row once, and shards appear one by one.

Any number of processes may write into one folder: each takes shards that nobody works on. What an
interruption leaves is finished by the next start.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.files import ensure_writable_folder
from training.data.packing import collate
from training.input_settings import TORCH_DTYPES
from training.loss.batch import Batch
from training.loss.views import read_rows
from training.setup.preparation import Prepared
from training.target_states.index import (
    FeatureIndex,
    Shard,
    checksum,
    identify,
    is_intact,
    is_whole,
    packed_row,
    read_index,
    ways_to_repeat,
)
from training.target_states.plan import FeaturePlan
from training.target_states.states import States


class ShardFolder:
    """Knows which shards are there, and who works on which.

    Args:
        path: the folder; created if it is missing.
        fresh: the index of what is to be written, without shards.

    Raises:
        ConfigError: the folder cannot be written to, or holds other features.
        CheckpointError: its index cannot be read.
    """

    def __init__(self, path: Path, fresh: FeatureIndex) -> None:
        self.path = ensure_writable_folder(path)
        with self._lock("index"):
            index = read_index(self.path)
            if index is None:
                fresh.write(self.path)
        self.index = fresh if index is None else index
        _require_same(self.path, self.index, fresh)

    def unfinished(self) -> list[int]:
        """Return the numbers of the shards that are not there in full by now."""
        index = self.index = read_index(self.path) or self.index
        whole = {shard.first_row for shard in index.shards if is_whole(self.path, shard)}
        return [n for n in range(index.num_shards) if index.rows_of(n).start not in whole]

    @contextmanager
    def claim(self, number: int) -> Iterator[bool]:
        """Yield whether a shard is this process's to write: missing, and nobody is at it."""
        with ExitStack() as held:
            try:
                held.enter_context(self._lock(self.index.file_of(number)).acquire(timeout=0))
                is_free = True
            except Timeout:
                is_free = False
            yield is_free and number in self.unfinished()

    def add(self, shard: Shard) -> None:
        """Take note of a finished shard."""
        self._update(lambda index: index.with_shard(shard))

    def drop_damaged(self) -> list[str]:
        """Forget the shards whose bytes are not those that were written; return their names."""
        damaged = [shard for shard in self.index.shards if not is_intact(self.path, shard)]
        self._update(lambda index: index.without(damaged))
        return [shard.file for shard in damaged]

    def tidy(self) -> None:
        """Remove what only writing needs."""
        for lock in self.path.glob(".*.lock"):
            lock.unlink(missing_ok=True)

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.path / f".{name}.lock")

    def _update(self, change: Callable[[FeatureIndex], FeatureIndex]) -> None:
        with self._lock("index"):
            self.index = change(read_index(self.path) or self.index)
            self.index.write(self.path)


def _require_same(folder: Path, found: FeatureIndex, wanted: FeatureIndex) -> None:
    difference = found.identity.difference(wanted.identity)
    if difference is None and found.widths != wanted.widths:
        difference = ("parts", ", ".join(found.widths), ", ".join(wanted.widths))
    if difference is not None:
        name, got, expected = difference
        raise ConfigError(
            f"the folder {folder} holds other features ({name} differs)",
            expected=expected,
            got=got,
            remedy=f"{ways_to_repeat(name)}choose another folder",
        )


SHARD_BYTES = 2 * 2**30  # a shard is in memory until it is written

Advance = Callable[[int], None]


class FeatureWriter:
    """Writes the features of a run's rows into a folder.

    Args:
        inputs: of the run; its target is where it shall compute when `write` is called.
        folder: of the shards; created if it is missing.
        shard_bytes: size of a shard, if the folder is new.

    Raises:
        ConfigError: the folder cannot be written to, or holds other features.
        CheckpointError: its index cannot be read.
    """

    def __init__(self, inputs: Prepared, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._inputs = inputs
        self._row_length = inputs.settings.data.sequence_length
        self._micro_batch = inputs.settings.batch.micro_batch_size
        self._states = States.needed_by(inputs.drafter_config)
        self.folder = ShardFolder(folder, self._new_index(shard_bytes))

    @property
    def plan(self) -> FeaturePlan:
        """What all shards take, and what is left to be done."""
        left, index = self.folder.unfinished(), self.folder.index
        return FeaturePlan(
            sequence_length=self._row_length,
            num_rows=index.identity.total_rows,
            num_rows_left=sum(len(index.rows_of(number)) for number in left),
            bytes_per_position=index.bytes_per_position,
            num_shards=index.num_shards,
        )

    def write(self, advance: Advance = lambda _rows: None) -> bool:
        """Write all shards that are missing and that no other process works on.

        Args:
            advance: is told how many rows more are done.

        Returns:
            Whether all are there now; else other processes are still writing the last ones.

        Raises:
            ConfigError: they do not fit on the disk.
            CheckpointError: a shard cannot be written.
        """
        self.plan.check_disk(self.folder.path)
        for number in self.folder.unfinished():
            with self.folder.claim(number) as is_mine:
                if is_mine:
                    rows = self.folder.index.rows_of(number)
                    self.folder.add(self._write_shard(number, self._read(rows, advance)))
        is_complete = not self.folder.unfinished()
        if is_complete:
            self.folder.tidy()
        return is_complete

    def _new_index(self, shard_bytes: int) -> FeatureIndex:
        index = FeatureIndex(
            identity=identify(self._inputs),
            widths=self._states.widths(self._inputs.target.spec),
            rows_per_shard=self._micro_batch,
            micro_batch=self._micro_batch,
        )
        # Whole micro-batches, so that those of a shard do not depend on the shards before it.
        micro_batches = shard_bytes // (
            index.bytes_per_position * self._row_length * self._micro_batch
        )
        rows = max(1, micro_batches) * self._micro_batch
        return index.model_copy(update={"rows_per_shard": rows})

    def _write_shard(self, number: int, parts: dict[str, Tensor]) -> Shard:
        rows = self.folder.index.rows_of(number)
        final = self.folder.path / self.folder.index.file_of(number)
        partial = final.with_name(f".{final.name}.partial")
        try:
            save_file(parts, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            sha256, num_bytes = checksum(partial), partial.stat().st_size
            partial.replace(final)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write {final}",
                expected="a disk with room for it",
                got=str(error).strip().splitlines()[0],
                remedy="make room and start again: finished shards are kept",
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        return Shard(
            file=final.name,
            first_row=rows.start,
            num_rows=len(rows),
            num_bytes=num_bytes,
            sha256=sha256,
        )

    @torch.no_grad()
    def _read(self, rows: range, advance: Advance) -> dict[str, Tensor]:
        """Return all parts of some rows, as they are kept."""
        dtype = TORCH_DTYPES[self._inputs.settings.target_states.dtype]
        parts = {
            name: torch.empty(len(rows), self._row_length, width, dtype=dtype)
            for name, width in self.folder.index.widths.items()
        }
        target, states = self._inputs.target, self._states
        cache = target.new_cache(self._micro_batch, self._row_length, states.hidden)
        for begin in range(0, len(rows), self._micro_batch):
            numbers = rows[begin : begin + self._micro_batch]
            output = read_rows(target, self._batch(numbers), cache)
            for name, part in states.taken_from(output).items():
                parts[name][begin : begin + len(numbers)] = part[: len(numbers)].cpu()
            advance(len(numbers))
        return parts

    def _batch(self, numbers: range) -> Batch:
        """Return rows as a full micro-batch: products of other shapes may round differently."""
        padding = [numbers[-1]] * (self._micro_batch - len(numbers))
        rows = [packed_row(self._inputs, number) for number in (*numbers, *padding)]
        nowhere = np.zeros((1, self._row_length), np.int64)  # the target knows of no anchors
        return collate((row, nowhere) for row in rows).to(self._inputs.target.device)
