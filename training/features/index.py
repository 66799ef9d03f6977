"""The index of a folder of features: whose they are, and which shards there are."""

import hashlib
from collections.abc import Container
from pathlib import Path

from pydantic import ValidationError

from jakiro.errors import CheckpointError
from jakiro.files import write_atomically
from jakiro.settings import Settings
from training.features.identity import FeatureIdentity

INDEX = "index.json"


class Shard(Settings):
    """One file of whole rows.

    Attributes:
        file: its name.
        first_row: number of its first row.
        num_rows: how many follow each other in it.
        num_bytes: its size.
        sha256: its checksum.
    """

    file: str
    first_row: int
    num_rows: int
    num_bytes: int
    sha256: str


class FeatureIndex(Settings):
    """What a folder holds.

    Attributes:
        identity: of target and rows.
        widths: numbers per position of each part, see `training.features.states`.
        rows_per_shard: of every shard but the last.
        micro_batch: rows that the target read at a time; other sizes round differently.
        shards: those that are finished, in the order of their rows.
    """

    identity: FeatureIdentity
    widths: dict[str, int]
    rows_per_shard: int
    micro_batch: int
    shards: tuple[Shard, ...] = ()

    @property
    def num_shards(self) -> int:
        """How many shards there are when all are finished."""
        return -(-self.identity.total_rows // self.rows_per_shard)

    @property
    def bytes_per_position(self) -> int:
        """What one position of a row takes."""
        return sum(self.widths.values()) * {"fp32": 4, "bf16": 2}[self.identity.dtype]

    def rows_of(self, number: int) -> range:
        """Return the rows of a shard."""
        first = number * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.identity.total_rows))

    def file_of(self, number: int) -> str:
        """Return the name of a shard's file."""
        return f"features-{number:06}.safetensors"

    def with_shard(self, shard: Shard) -> "FeatureIndex":
        """Return the index with one more shard, or with another one in its place."""
        others = (one for one in self.shards if one.first_row != shard.first_row)
        shards = sorted((*others, shard), key=lambda one: one.first_row)
        return self.model_copy(update={"shards": tuple(shards)})

    def without(self, shards: Container[Shard]) -> "FeatureIndex":
        """Return the index without some shards."""
        left = tuple(shard for shard in self.shards if shard not in shards)
        return self.model_copy(update={"shards": left})

    def write(self, folder: Path) -> None:
        """Replace the folder's index."""
        write_atomically(folder / INDEX, self.model_dump_json(indent=1) + "\n")


def read_index(folder: Path) -> FeatureIndex | None:
    """Return the index of a folder, or None where there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return FeatureIndex.model_validate_json((folder / INDEX).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"the index of the features in {folder} cannot be read",
            expected="what `jakiro features` wrote",
            got=str(error).strip().splitlines()[0],
            remedy="write the features anew into another folder",
        ) from error


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_whole(folder: Path, shard: Shard) -> bool:
    """Whether a shard's file is there in its full size; its bytes are not read."""
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.num_bytes


def is_intact(folder: Path, shard: Shard) -> bool:
    """Whether a shard's file is, byte by byte, what was written."""
    return is_whole(folder, shard) and checksum(folder / shard.file) == shard.sha256
