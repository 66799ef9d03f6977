"""Memory of the parameters, gradients and optimizer states that DeepSpeed keeps in one process."""

from dataclasses import dataclass

from jakiro.utils.pretrained import Kind, choose_device
from training.config import TrainSettings
from training.distributed.deepspeed_config import build_deepspeed_config
from training.loop.optimizer import build_optimizer
from training.module import TrainingModule

_MASTER = 4  # bytes of a master weight or of a moment
_BUCKET, _PERSISTENT = 500_000_000, 100_000  # DeepSpeed's default limits, in elements


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


def state_bytes(
    module: TrainingModule,
    settings: TrainSettings,
    num_processes: int,
    device: Kind | None = None,
) -> StateBytes:
    """Return the bytes that one process keeps for a module, without allocating them.

    With ZeRO 1 and 2, each process keeps all parameters, but only a part of the master weights and
    moments. With ZeRO 3, it keeps a part of every parameter, and small parameters in full. The
    padding of the parts is not counted.
    """
    kind = device or choose_device(settings.engine.device).type
    config = build_deepspeed_config(settings, num_processes, kind)
    zero = config["zero_optimization"]
    stage, is_offloaded = zero["stage"], "offload_optimizer" in zero
    width = 2 if config["bf16"]["enabled"] or config["fp16"]["enabled"] else 4
    sizes = [part.numel() for part in module.parameters() if part.requires_grad]
    total, frozen = sum(sizes), sum(p.numel() for p in module.parameters() if not p.requires_grad)
    moments = sum(
        # Muon keeps one moment of each of its matrices; AdamW keeps two moments of each parameter.
        (1 if group.get("muon") else 2) * part.numel()
        for group in build_optimizer(module, settings.optimizer).param_groups
        for part in group["params"]
    )
    if not stage:
        return StateBytes(width * (total + frozen), width * total, _MASTER * moments)
    own = -(-total // num_processes)
    optimizer = _MASTER * -(-(total + moments) // num_processes)
    bucket = zero.get("reduce_bucket_size", _BUCKET)
    if kind == "cpu":
        bucket = min(bucket, total)  # a part that is never used takes no main memory
    kept, gathered = total, 0
    if stage == 3:
        threshold = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
        kept = own + (sum(s for s in sizes if s <= threshold) if num_processes > 1 else 0)
        gathered = total
    return StateBytes(
        parameters=width * (kept + frozen),
        gradients=width * (total if stage == 1 else own) + _MASTER * own,
        optimizer=optimizer,
        buffers=width * (bucket + gathered),
        host=(optimizer + _MASTER * own) * is_offloaded + width * own * ("offload_param" in zero),
    )
