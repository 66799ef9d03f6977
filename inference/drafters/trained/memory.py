"""The memory that a trained drafter reads, for a device that drafts apart from the target."""

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import CostAware, Drafter
from inference.remote.memory_rows import RowFormat
from inference.remote.messages import RowDtype, RowEncoding
from jakiro.drafter import JakiroDrafter
from jakiro.utils.files import fingerprint

_DTYPES: tuple[RowDtype, ...] = ("float32", "bfloat16", "float16")


def memory_drafter(drafter: Drafter | None) -> TrainedDrafter | None:
    """Return the trained drafter that encodes memory; None if there is none for a device.

    A drafter that uses the target's last layers cannot draft apart from them.
    """
    trained = drafter.slow_part if isinstance(drafter, CostAware) else drafter
    return trained if isinstance(trained, TrainedDrafter) and trained.tail is None else None


def encoder_fingerprint(drafter: JakiroDrafter) -> str:
    """Return the fingerprint of everything that encodes memory, which is the same in every dtype.

    It depends on the sign of each weight of the encoders, on the settings of memory and trunk, and
    on the target. Drafters that differ in other weights read the same memory. Nothing but the sign
    is the same after rounding to bfloat16 and after rounding to float16, so drafters whose encoders
    differ only in the size of weights have the same fingerprint. Rows of the other drafter's memory
    can cost tokens per step, but do not change the text.
    """
    digest = hashlib.sha256()
    for module in _encoders(drafter):
        for name, weight in sorted(module.state_dict().items()):
            digest.update(f"{name}:{tuple(weight.shape)}:".encode())
            digest.update(torch.signbit(weight.detach()).cpu().contiguous().numpy().tobytes())
    config = drafter.config
    settings = config.settings
    read = [settings.memory.model_dump(mode="json"), settings.trunk.model_dump(mode="json")]
    return fingerprint(config.target_record.fingerprint, read, digest.hexdigest())[:32]


def row_format(drafter: JakiroDrafter, dtype: RowDtype, encoding: RowEncoding) -> RowFormat:
    return RowFormat(tuple(drafter.memory_shapes), dtype, encoding)


def row_dtype(drafter: JakiroDrafter) -> RowDtype:
    """Return the name of the dtype in which a drafter computes memory."""
    return next(name for name in _DTYPES if drafter.dtype is getattr(torch, name))


def _encoders(drafter: JakiroDrafter) -> Iterator[nn.Module]:
    trunk, attention = drafter.trunk, drafter.trunk.cross_attention
    encoders = (drafter.memory_encoder, drafter.feature_encoder)
    yield from (module for module in encoders if module is not None)
    if attention is not None:
        yield from (attention.memory_norm, attention.key_value)
    if trunk.memory_norm is not None:
        yield from (trunk.memory_norm, *(layer.project for layer in trunk.self_attentions))
