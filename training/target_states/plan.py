"""What writing features takes, told before anything is written."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jakiro.config import JakiroConfig
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetSpec
from training.config import TrainSettings
from training.input_settings import TORCH_DTYPES
from training.target_states.index import read_index
from training.target_states.states import States

_SHARE_OF_DISK = 0.95  # of what is free, the most that may be filled


@dataclass(frozen=True)
class FeaturePlan:
    """What is to be written.

    Attributes:
        sequence_length: positions of a row, padding among them.
        num_rows: all rows.
        num_rows_left: those that are not written yet.
        bytes_per_position: of all parts.
        num_shards: files.
    """

    sequence_length: int
    num_rows: int
    num_rows_left: int
    bytes_per_position: int
    num_shards: int

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return self.num_rows * self.sequence_length * self.bytes_per_position

    @property
    def num_bytes_left(self) -> int:
        """Size of the shards that are not written yet."""
        return self.num_rows_left * self.sequence_length * self.bytes_per_position

    def __str__(self) -> str:
        files = "1 shard" if self.num_shards == 1 else f"{self.num_shards:,} shards"
        return (
            f"{self.num_rows * self.sequence_length:,} tokens x {self.bytes_per_position:,} bytes = "
            f"{_size(self.num_bytes)} in {files}, {_size(self.num_bytes_left)} still to be written"
        )

    def check_disk(self, folder: Path) -> None:
        """Refuse to begin what the disk of a folder cannot hold.

        Raises:
            ConfigError: what is left does not fit with a margin of a twentieth.
        """
        free = shutil.disk_usage(folder).free
        if self.num_bytes_left > _SHARE_OF_DISK * free:
            raise ConfigError(
                f"the features do not fit on the disk of {folder}",
                expected=f"{_size(int(self.num_bytes_left / _SHARE_OF_DISK))} free",
                got=_size(free),
                remedy="choose another disk, target_states.dtype bf16, fewer of the target's layers in "
                "drafter.memory.layers, or less data; target_states.source online needs no disk",
            )


class ExpectedBytes(NamedTuple):
    """Size of all shards that a run reads; `is_exact` if its rows are known."""

    size: int
    is_exact: bool


def expected_bytes(
    settings: TrainSettings, config: JakiroConfig, spec: TargetSpec
) -> ExpectedBytes:
    """Return the size of all shards that a run reads; 0 if its target runs beside the drafter.

    Where none have been begun, nobody has counted the rows of the data; then every row of the run's
    steps counts as another one, though these may come back to the same.

    Args:
        settings: of the run.
        config: of the drafter.
        spec: of the target.

    Raises:
        CheckpointError: there is an index of shards that cannot be read.
    """
    target_states, batch = settings.target_states, settings.batch
    if target_states.source == "online" or target_states.folder is None:
        return ExpectedBytes(0, is_exact=True)
    index = read_index(target_states.folder.expanduser().absolute())
    if index is not None:
        num_rows, num_bytes = index.identity.total_rows, index.bytes_per_position
    else:
        widths = States.needed_by(config).widths(spec)
        num_bytes = sum(widths.values()) * TORCH_DTYPES[target_states.dtype].itemsize
        num_rows = settings.steps * batch.global_batch_size
    size = num_rows * settings.data.sequence_length * num_bytes
    return ExpectedBytes(size, is_exact=index is not None)


def _size(num_bytes: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{num_bytes / 2 ** (10 * power):,.1f} {units[power]}"
