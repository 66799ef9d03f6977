"""The index of a folder of target states: a fingerprint and a list of files (shards)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import hash_weights
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.settings import Settings
from jakiro.utils.wording import dtype_name, summary_of
from training.data.packing import PackedSequence
from training.input_settings import TargetStateDtype
from training.setup.preparation import RunInputs

# Largest number of packed sequences, spread evenly over the data, whose content is hashed.
_MAX_HASHED = 4096

# Keys of a target's configuration that are not hashed, because they describe the target's origin or
# the way it is run.
_BOOKKEEPING = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
INDEX = "index.json"

# Names and dtypes of the normalizers in a shard, each of shape [sequences, length].
NORMALIZERS = {"log_sum": torch.float32, "best": torch.int32}


class TargetStateFingerprint(Settings):
    """Properties that must be the same for stored target states and for a run that reads them.

    Attributes:
        target_weights: hash of every byte of the target's weights, adapters included.
        target_configuration: hash of the target's configuration, and of the scales and the on/off
            switches of its adapters.
        packing: hash of packed sequences, spread evenly over the data if there are many.
        num_validation_sequences: number of validation sequences, which follow the training
            sequences.
    """

    target_dtype: str  # compared before the weights, whose hash depends on the dtype
    target_weights: str
    target_configuration: str
    data: str
    packing: str
    sequence_length: int
    num_sequences: int
    num_validation_sequences: int
    dtype: TargetStateDtype

    @property
    def total_sequences(self) -> int:
        return self.num_sequences + self.num_validation_sequences


def fingerprint_of(inputs: RunInputs) -> TargetStateFingerprint:
    """Return the fingerprint of a run's target states; all weights of the target are read."""
    return TargetStateFingerprint(
        target_weights=hash_weights(inputs.target.model),
        target_configuration=_hash_configuration(inputs.target),
        target_dtype=dtype_name(inputs.target.dtype),
        data=inputs.data_fingerprint,
        packing=_hash_packing(inputs),
        sequence_length=inputs.settings.data.sequence_length,
        num_sequences=len(inputs.sequences),
        num_validation_sequences=len(inputs.validation),
        dtype=inputs.settings.target_states.dtype,
    )


def packed_sequence(inputs: RunInputs, number: int) -> PackedSequence:
    """Return a packed sequence by its index; validation sequences follow training sequences."""
    count = len(inputs.sequences)
    return (
        inputs.sequences.sequence(number)
        if number < count
        else inputs.validation.sequence(number - count)
    )


def _hash_configuration(target: TargetAdapter) -> str:
    values = json.loads(target.config.to_json_string(use_diff=False))
    relevant = {
        name: value
        for name, value in values.items()
        if not name.startswith("_") and name not in _BOOKKEEPING
    }
    adapters = [
        [name, list(layer.active_adapters), layer.disable_adapters, getattr(layer, "scaling", {})]
        for name, layer in target.model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    ]
    return fingerprint(relevant, adapters)


def _hash_packing(inputs: RunInputs) -> str:
    total = len(inputs.sequences) + len(inputs.validation)
    digest = hashlib.sha256()
    for number in range(0, total, -(-total // _MAX_HASHED)):
        sequence = packed_sequence(inputs, number)
        for part in (sequence.token_ids, sequence.positions, sequence.documents):
            digest.update(part.tobytes())
    return digest.hexdigest()


class TargetStateIndex(Settings):
    """The index of a folder of target states.

    Attributes:
        widths: number of values per position, by name of the part; see
            `training.target_states.store`.
        micro_batch_size: number of sequences that the target read at a time, which affects
            rounding.
        has_normalizers: whether shards also contain the normalizers of the target's distributions,
            from which a loss over a draft vocabulary can be computed without the other logits.
    """

    fingerprint: TargetStateFingerprint
    widths: dict[str, int]
    sequences_per_shard: int
    micro_batch_size: int
    has_normalizers: bool = False  # in folders of earlier versions

    @property
    def num_shards(self) -> int:
        """The number of shards (files with the states of consecutive sequences)."""
        return -(-self.fingerprint.total_sequences // self.sequences_per_shard)

    @property
    def bytes_per_position(self) -> int:
        normalizers = NORMALIZERS.values() if self.has_normalizers else ()
        of_states = sum(self.widths.values()) * TORCH_DTYPES[self.fingerprint.dtype].itemsize
        return of_states + sum(dtype.itemsize for dtype in normalizers)

    def sequences_of(self, number: int) -> range:
        first = number * self.sequences_per_shard
        return range(first, min(first + self.sequences_per_shard, self.fingerprint.total_sequences))

    def difference(self, other: "TargetStateIndex") -> tuple[str, Any, Any] | None:
        """Return the name and both values of the first property that differs; None if none does."""
        for name in TargetStateFingerprint.model_fields:
            values = getattr(self.fingerprint, name), getattr(other.fingerprint, name)
            if values[0] != values[1]:
                return name, *values
        if self.widths != other.widths:
            return "parts", ", ".join(self.widths), ", ".join(other.widths)
        return None

    def write(self, folder: Path) -> None:
        write_atomically(folder / INDEX, self.model_dump_json(indent=1) + "\n")


def read_index(folder: Path) -> TargetStateIndex | None:
    try:
        content = (folder / INDEX).read_bytes()
        return TargetStateIndex.model_validate_json(content, extra="ignore")
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"the index of the target states in {folder} cannot be read", got=summary_of(error)
        ) from error


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"features-{number:06}.safetensors"


def is_whole(path: Path) -> bool:
    """Return whether a shard has the size that its header says, without reading its other bytes."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
