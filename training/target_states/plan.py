"""The size of target states on disk, computed before anything is written."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jakiro.config import JakiroConfig
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetSpec
from jakiro.utils.wording import counted
from training.config import TrainSettings
from training.input_settings import TargetStateDtype
from training.target_states.index import bytes_of, read_index
from training.target_states.states import States, needs_normalizers

_SHARE_OF_DISK = 0.95  # largest share of the free disk space that may be filled


@dataclass(frozen=True)
class TargetStatePlan:
    """The size of a run's target states, and of those that are still to be written."""

    sequence_length: int
    num_sequences: int
    num_sequences_left: int
    bytes_per_position: int
    num_shards: int
    dtype: TargetStateDtype

    @property
    def num_bytes(self) -> int:
        """The size of all shards in bytes."""
        return self.num_sequences * self.sequence_length * self.bytes_per_position

    @property
    def num_bytes_left(self) -> int:
        """The size in bytes of the shards that are not written yet."""
        return self.num_sequences_left * self.sequence_length * self.bytes_per_position

    def __str__(self) -> str:
        files = counted(self.num_shards, "shard")
        num_tokens = self.num_sequences * self.sequence_length
        return (
            f"{num_tokens:,} tokens x {self.bytes_per_position:,} bytes = "
            f"{_size(self.num_bytes)} in {files}, {_size(self.num_bytes_left)} still to be written"
        )

    def check_disk(self, folder: Path) -> None:
        """Raise an error if the remaining shards may not fit on the disk of a folder."""
        free = shutil.disk_usage(folder).free
        if self.num_bytes_left > _SHARE_OF_DISK * free:
            halve = "set target_states.dtype=bf16, " if self.dtype == "fp32" else ""
            raise ConfigError(
                f"the target states do not fit on the disk of {folder}",
                expected=f"{_size(int(self.num_bytes_left / _SHARE_OF_DISK))} free",
                got=_size(free),
                remedy=f"choose another disk, {halve}list fewer layers in drafter.memory.layers, "
                "use less data, or set target_states.source=online, which writes nothing to disk",
            )


class ExpectedBytes(NamedTuple):
    """The size of all shards that a run reads."""

    size: int
    is_exact: bool


def expected_bytes(
    settings: TrainSettings, config: JakiroConfig, spec: TargetSpec
) -> ExpectedBytes:
    """Return the size of all shards that a run reads; 0 if the target runs during training.

    As long as there is no index, the number of sequences is unknown. In this case, the result is
    the size for the sequences of all steps, as if no sequence were read again in a later epoch.
    """
    target_states, batch = settings.target_states, settings.batch
    if target_states.source == "online" or target_states.folder is None:
        return ExpectedBytes(0, is_exact=True)
    index = read_index(target_states.folder.expanduser().absolute())
    needed = States.needed_by(config).widths(spec)
    if index is not None and target_states.source == "available" and index.missing(needed):
        return ExpectedBytes(0, is_exact=True)
    if index is not None:
        num_sequences, num_bytes = index.fingerprint.total_sequences, index.bytes_per_position
    else:
        num_bytes = bytes_of(needed, target_states.dtype, needs_normalizers(config))
        num_sequences = settings.num_steps * batch.global_batch_size
    size = num_sequences * settings.data.sequence_length * num_bytes
    return ExpectedBytes(size, is_exact=index is not None)


def _size(num_bytes: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{num_bytes / 2 ** (10 * power):,.1f} {units[power]}"
