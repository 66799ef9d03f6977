"""Writer of target states, for which the target reads every packed sequence once.

Any number of processes may write to one folder, because each process locks the shard that it is
writing. After an interruption, the next run of `jakiro prepare states` writes the missing shards.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.wording import counted
from training.data.packing import collate
from training.loss.batch import Batch, Normalizers, read_batch
from training.loss.heads import normalizers_of
from training.setup.preparation import RunInputs
from training.target_states.index import (
    NORMALIZERS,
    TargetStateIndex,
    fingerprint_of,
    is_whole,
    packed_sequence,
    read_index,
    shard_path,
)
from training.target_states.store import States, needs_normalizers

_logger = get_logger(__name__)

SHARD_BYTES = 2 * 2**30  # approximate size of a shard, which is in memory until it is written

Advance = Callable[[int], None]


class TargetStateWriter:
    """Writes the target states of a run's sequences into a folder.

    Args:
        shard_bytes: approximate size of a shard in bytes; ignored if the folder has an index.
    """

    def __init__(self, inputs: RunInputs, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._inputs = inputs
        self._sequence_length = inputs.settings.data.sequence_length
        self._dtype = TORCH_DTYPES[inputs.settings.target_states.dtype]
        self._states = States.needed_by(inputs.drafter_config)
        self.folder = ensure_writable_folder(folder)
        self.index = self._join_index(self._new_index(shard_bytes))
        # All shards are written with the same size, because rounding may depend on the size.
        self._micro_batch_size = self.index.micro_batch_size
        if self._micro_batch_size != (wanted := inputs.settings.batch.micro_batch_size):
            _logger.info(
                f"the target reads micro-batches of {self._micro_batch_size} sequences instead of "
                f"{wanted}, as for the states that are already in {folder}"
            )

    @property
    def num_sequences_left(self) -> int:
        return sum(len(self.index.sequences_of(number)) for number in self._unfinished())

    def __str__(self) -> str:
        """Return the size of all shards, and of those that are still to be written."""
        index = self.index
        per_sequence = self._sequence_length * index.bytes_per_position
        total, left = (
            f"{count * per_sequence / 2**30:,.2f} GiB"
            for count in (index.fingerprint.total_sequences, self.num_sequences_left)
        )
        num_tokens = index.fingerprint.total_sequences * self._sequence_length
        return (
            f"{num_tokens:,} tokens x {index.bytes_per_position:,} bytes = {total} in "
            f"{counted(index.num_shards, 'shard')}, {left} still to be written"
        )

    def write(self, advance: Advance = lambda _count: None) -> bool:
        """Write all missing shards that no other process is writing.

        Returns:
            Whether all shards are finished. If not, other processes are still writing some shards.
        """
        for number in self._unfinished():
            path = shard_path(self.folder, number)
            try:
                with self._lock(path.name).acquire(timeout=0):
                    if not is_whole(path):
                        self._write_shard(path, self.index.sequences_of(number), advance)
            except Timeout:  # another process is writing the shard
                continue
        return not self._unfinished()

    def _unfinished(self) -> list[int]:
        numbers = range(self.index.num_shards)
        return [n for n in numbers if not is_whole(shard_path(self.folder, n))]

    def _lock(self, name: str) -> FileLock:
        # The file of a lock stays: after its removal, two processes could lock two files.
        return FileLock(self.folder / f".{name}.lock")

    def _join_index(self, fresh: TargetStateIndex) -> TargetStateIndex:
        """Return the index of the folder, which gets the fresh one if it has none."""
        with self._lock("index"):
            index = read_index(self.folder)
            if index is None:
                for number in range(fresh.num_shards):  # nothing says which states these are
                    shard_path(self.folder, number).unlink(missing_ok=True)
                fresh.write(self.folder)
                return fresh
        if (difference := index.difference(fresh)) is not None:
            name, got, expected = difference
            raise ConfigError(
                f"{self.folder} contains target states of a different run ({name} differs)",
                expected=expected,
                got=got,
                remedy="choose another folder",
            )
        return index

    def _new_index(self, shard_bytes: int) -> TargetStateIndex:
        size = self._inputs.settings.batch.micro_batch_size
        index = TargetStateIndex(
            fingerprint=fingerprint_of(self._inputs),
            widths=self._states.widths(self._inputs.target.spec),
            sequences_per_shard=size,
            micro_batch_size=size,
            has_normalizers=needs_normalizers(
                self._inputs.drafter_config, self._inputs.target.head
            ),
        )
        # A shard consists of whole micro-batches, so its content does not depend on other shards.
        micro_batches = shard_bytes // (index.bytes_per_position * self._sequence_length * size)
        count = max(1, micro_batches) * size
        return index.model_copy(update={"sequences_per_shard": count})

    def _write_shard(self, final: Path, sequences: range, advance: Advance) -> None:
        parts = self._read(sequences, advance)
        partial = final.with_name(f".{final.name}.partial")
        try:
            save_file(parts, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(final)
        finally:
            partial.unlink(missing_ok=True)

    @torch.no_grad()
    def _read(self, sequences: range, advance: Advance) -> dict[str, Tensor]:
        """Return all parts of the given sequences, in the dtype of the shards."""
        shape = (len(sequences), self._sequence_length)
        parts = {
            name: torch.empty(*shape, width, dtype=self._dtype)
            for name, width in self.index.widths.items()
        }
        if self.index.has_normalizers:
            parts |= {name: torch.empty(shape, dtype=dtype) for name, dtype in NORMALIZERS.items()}
        target, states = self._inputs.target, self._states
        cache = target.new_cache(self._micro_batch_size, self._sequence_length, states.hidden)
        for begin in range(0, len(sequences), self._micro_batch_size):
            numbers = sequences[begin : begin + self._micro_batch_size]
            batch = self._batch(numbers)
            output = read_batch(target, batch, cache)
            taken = states.take_from(output)
            if self.index.has_normalizers:
                taken |= self._normalizers(output.features, batch)._asdict()
            for name, part in taken.items():
                parts[name][begin : begin + len(numbers)] = part[: len(numbers)].cpu()
            advance(len(numbers))
        return parts

    def _normalizers(self, features: Tensor, batch: Batch) -> Normalizers:
        """Return the normalizers at all positions whose distribution a drafter learns.

        They are those of the features that a run reads: rounded to the dtype of the shards, and
        converted to the target's dtype.
        """
        target = self._inputs.target
        stored = features.to(self._dtype).to(target.dtype)
        chunk_size = self._inputs.settings.objective.chunk_size
        return normalizers_of(stored, batch.targets_exist(1), target.logits, chunk_size)

    def _batch(self, numbers: range) -> Batch:
        """Return a micro-batch, padded to full size because rounding may depend on the size."""
        padding = [numbers[-1]] * (self._micro_batch_size - len(numbers))
        sequences = [packed_sequence(self._inputs, number) for number in (*numbers, *padding)]
        anchors = np.zeros((1, self._sequence_length), np.int64)  # not read by the target
        batch = collate((sequence, anchors) for sequence in sequences)
        return batch.to(self._inputs.target.device)
