"""The index of a folder of features: whose they are, and which shards there are."""

import hashlib
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import ValidationError

from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import hash_weights
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.settings import Settings
from training.data.packing import PackedRow
from training.input_settings import TargetStateDtype
from training.setup.preparation import Prepared

_SAMPLED_ROWS = 4096  # are hashed, evenly spread; beside them the data's own fingerprint counts

# Of a target's configuration, what says where it came from or how it is run.
_BOOKKEEPING = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}


class FeatureIdentity(Settings):
    """What features must have in common with a run that reads them.

    Attributes:
        target_dtype: what it computed in.
        target_weights: hash of every byte of the target's weights, adapters included.
        target_configuration: hash of what else decides its features: its configuration, and how
            adapters are scaled and switched.
        data: fingerprint of data and tokenizer.
        packing: hash of packed rows.
        sequence_length: tokens of a row.
        num_rows: rows to train on, which come first.
        num_held_out_rows: rows to measure on, which follow.
        dtype: what the features are kept in.
    """

    target_dtype: str  # before the weights, which then differ, too
    target_weights: str
    target_configuration: str
    data: str
    packing: str
    sequence_length: int
    num_rows: int
    num_held_out_rows: int
    dtype: TargetStateDtype

    @property
    def total_rows(self) -> int:
        """All rows."""
        return self.num_rows + self.num_held_out_rows

    def difference(self, other: "FeatureIdentity") -> tuple[str, Any, Any] | None:
        """Return the name of the first thing that differs, and both values; None if none does."""
        pairs = (
            (name, getattr(self, name), getattr(other, name)) for name in type(self).model_fields
        )
        return next((pair for pair in pairs if pair[1] != pair[2]), None)


def identify(inputs: Prepared) -> FeatureIdentity:
    """Return the identity of the features of a run's rows; reads all of the target's weights."""
    return FeatureIdentity(
        target_weights=hash_weights(inputs.target.model),
        target_configuration=_hash_configuration(inputs.target),
        target_dtype=str(inputs.target.dtype).removeprefix("torch."),
        data=inputs.data_fingerprint,
        packing=_hash_rows(inputs),
        sequence_length=inputs.settings.data.sequence_length,
        num_rows=len(inputs.rows),
        num_held_out_rows=len(inputs.held_out),
        dtype=inputs.settings.target_states.dtype,
    )


def ways_to_repeat(name: str) -> str:
    """Return how a run gets the rows that features are of, if it is rows that differ.

    Args:
        name: of what differs.
    """
    if name not in ("packing", "sequence_length", "num_rows", "num_held_out_rows"):
        return ""
    return (
        "set data.split, data.sequence_length, data.validation_size and data.fraction as they were when the "
        "features were written; or "
    )


def packed_row(inputs: Prepared, number: int) -> PackedRow:
    """Return a row by the number that features know it by: training rows, then held-out ones."""
    count = len(inputs.rows)
    return inputs.rows.row(number) if number < count else inputs.held_out.row(number - count)


def _hash_configuration(target: TargetAdapter) -> str:
    values = json.loads(target.config.to_json_string(use_diff=False))
    kept = {
        name: value
        for name, value in values.items()
        if not name.startswith("_") and name not in _BOOKKEEPING
    }
    adapters = [
        [name, list(layer.active_adapters), layer.disable_adapters, getattr(layer, "scaling", {})]
        for name, layer in target.model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    ]
    return fingerprint(kept, adapters)


def _hash_rows(inputs: Prepared) -> str:
    total = len(inputs.rows) + len(inputs.held_out)
    digest = hashlib.sha256()
    for number in range(0, total, -(-total // _SAMPLED_ROWS)):
        row = packed_row(inputs, number)
        for part in (row.token_ids, row.positions, row.documents):
            digest.update(part.tobytes())
    return digest.hexdigest()


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
        widths: numbers per position of each part, see `training.target_states.states`.
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
