"""Memory of the parameters, gradients and optimizer states that DeepSpeed keeps in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jakiro.utils.pretrained import Kind, choose_device
from training.config import TrainSettings
from training.distributed.deepspeed_config import build_deepspeed_config
from training.loop.optimizer import build_optimizer
from training.module import TrainingModule

_MASTER = 4  # bytes of a master weight or of a moment
_ALIGNMENT = 2  # ZeRO 1 and 2 pad each process's part to a multiple of this number of elements
# DeepSpeed's default limits, in elements.
_BUCKET, _PERSISTENT, _LIVE, _SUBGROUP = 500_000_000, 100_000, 1_000_000_000, 1_000_000_000


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one process keeps for the drafter.

    Attributes:
        gradients: bytes of the gradients after a backward pass, and of the gradients that the
            optimizer reads.
        optimizer: bytes of separate master weights, if there are any, and of the moments.
        host: part of the bytes above that is in main memory instead of the device's memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        """The number of bytes in the device's memory."""
        return self.parameters + self.gradients + self.optimizer + self.buffers - self.host


@dataclass(frozen=True)
class _Group:
    """A group of parameters that ZeRO joins: sizes, and number of moments per parameter."""

    sizes: tuple[int, ...]
    moments: int

    @property
    def total(self) -> int:
        return sum(self.sizes)


def state_bytes(
    module: TrainingModule,
    settings: TrainSettings,
    num_processes: int,
    device: Kind | None = None,
) -> StateBytes:
    """Return the bytes that one process keeps for a module, without allocating them."""
    kind = device or choose_device(settings.engine.device).type
    config = build_deepspeed_config(settings, num_processes, kind)
    groups = _groups(build_optimizer(module, settings.optimizer).param_groups)
    width = 2 if config["bf16"]["enabled"] or config["fp16"]["enabled"] else 4
    total = sum(group.total for group in groups)
    zero = config["zero_optimization"]
    bucket = zero.get("reduce_bucket_size", _BUCKET)
    if kind == "cpu":
        bucket = min(bucket, total)  # a part that is never used takes no main memory
    if zero["stage"] == 3:
        return _partitioned(groups, zero, width, num_processes, bucket)
    frozen = width * sum(part.numel() for part in module.parameters() if not part.requires_grad)
    if zero["stage"]:
        trained = _flattened(groups, zero, width, num_processes, bucket)
        return replace(trained, parameters=trained.parameters + frozen)
    moments = sum(group.moments * group.total for group in groups)
    return StateBytes(width * total + frozen, width * total, _MASTER * moments)


def _flattened(
    groups: Sequence[_Group], zero: Mapping[str, Any], width: int, num_processes: int, bucket: int
) -> StateBytes:
    """Return the bytes of a process with ZeRO 1 or 2.

    Each process keeps all parameters, but only a part of the master weights and moments.
    """
    padded = [_filled(group.total, _ALIGNMENT * num_processes) for group in groups]
    pairs = list(zip(groups, padded, strict=True))
    own = sum(padded) // num_processes
    optimizer = sum(_MASTER * (1 + group.moments) * size for group, size in pairs) // num_processes
    kept = own if zero["stage"] == 2 else sum(group.total for group in groups)
    gradients = width * kept + _MASTER * own
    is_offloaded = "offload_optimizer" in zero
    return StateBytes(
        parameters=width * sum(padded),
        gradients=gradients,
        optimizer=optimizer,
        buffers=width * bucket,
        host=optimizer + _MASTER * own if is_offloaded else 0,
    )


def _partitioned(
    groups: Sequence[_Group], zero: Mapping[str, Any], width: int, num_processes: int, bucket: int
) -> StateBytes:
    """Return the bytes of a process with ZeRO 3.

    Each process keeps a part of every parameter; small parameters are kept in full.
    """
    parts = [
        (-(-size // num_processes), size, group.moments) for group in groups for size in group.sizes
    ]
    own = sum(part for part, *_ in parts)
    threshold = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
    persistent = sum(size for _, size, _ in parts if size <= threshold and num_processes > 1)
    optimizer = sum(_MASTER * (1 + moments) * part for part, _, moments in parts)
    gathered = min(sum(size for _, size, _ in parts), _LIVE)
    updated = _MASTER * min(own, _SUBGROUP)
    host = (optimizer + updated) * ("offload_optimizer" in zero)
    return StateBytes(
        parameters=width * (own + persistent),
        gradients=width * own + updated,
        optimizer=optimizer,
        buffers=width * (bucket + gathered),
        host=host + width * own * ("offload_param" in zero),
    )


def _groups(param_groups: Sequence[Mapping[str, Any]]) -> list[_Group]:
    # Muon keeps one moment of each of its matrices; AdamW keeps two moments of each parameter.
    return [
        _Group(tuple(part.numel() for part in group["params"]), 1 if group.get("muon") else 2)
        for group in param_groups
    ]


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
