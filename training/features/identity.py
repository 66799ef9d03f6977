"""Of which target and which rows features are: stronger than names, for shards cost days."""

import hashlib
import json
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer

from jakiro.files import fingerprint
from jakiro.settings import Settings
from jakiro.target import TargetAdapter
from jakiro.target_record import hash_weights
from training.data.packing import PackedRow
from training.input_settings import FeatureDtype
from training.preparation import Prepared

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
        row_length: tokens of a row.
        num_rows: rows to train on, which come first.
        num_held_out_rows: rows to measure on, which follow.
        dtype: what the features are kept in.
    """

    target_dtype: str  # before the weights, which then differ, too
    target_weights: str
    target_configuration: str
    data: str
    packing: str
    row_length: int
    num_rows: int
    num_held_out_rows: int
    dtype: FeatureDtype

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
        row_length=inputs.settings.data.row_length,
        num_rows=len(inputs.rows),
        num_held_out_rows=len(inputs.held_out),
        dtype=inputs.settings.features.dtype,
    )


def ways_to_repeat(name: str) -> str:
    """Return how a run gets the rows that features are of, if it is rows that differ.

    Args:
        name: of what differs.
    """
    if name not in ("packing", "row_length", "num_rows", "num_held_out_rows"):
        return ""
    return (
        "set data.split, data.row_length, data.held_out and data.share as they were when the "
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
