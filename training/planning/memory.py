"""Memory of a run: states that DeepSpeed keeps, and one micro-batch, simulated on the meta device.

The simulation runs the training code, so it covers every variant of the drafter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils.devices import Kind, choose_device
from jakiro.utils.pretrained import TORCH_DTYPES, load_config
from jakiro.utils.wording import summary_of
from training.config import TrainSettings, anchor_rule
from training.input_settings import TargetSettings
from training.loop.optimizer import build_optimizer
from training.loop.trainer import build_deepspeed_config
from training.loss.batch import Batch
from training.module import TargetReader, TrainingModule

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
    share = -(-total // num_processes)
    optimizer = _MASTER * -(-(total + moments) // num_processes)
    bucket = zero.get("reduce_bucket_size", _BUCKET)
    if kind == "cpu":
        bucket = min(bucket, total)  # a part that is never used takes no main memory
    kept, gathered = total, 0
    if stage == 3:
        threshold = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
        kept = share + (sum(s for s in sizes if s <= threshold) if num_processes > 1 else 0)
        gathered = total
    return StateBytes(
        parameters=width * (kept + frozen),
        gradients=width * (total if stage == 1 else share) + _MASTER * share,
        optimizer=optimizer,
        buffers=width * (bucket + gathered),
        host=(optimizer + _MASTER * share) * is_offloaded
        + width * share * ("offload_param" in zero),
    )


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of live tensors that were created inside its context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors((args, kwargs)):  # inputs are not new
            self._known.add(tensor.untyped_storage()._cdata)
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            self._count(tensor)
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            finalize(storage, self._forget, storage._cdata, storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.now -= count


@dataclass(frozen=True)
class Simulation:
    """Memory and operations of one process for one micro-batch, if every position has a loss."""

    target_states: int
    activations: int
    target_flops: int
    drafter_flops: int


@lru_cache(maxsize=2)
def target_on_meta(settings: TargetSettings) -> TargetAdapter:
    config = load_config(settings.name_or_path, remedy="check target.name_or_path")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[settings.dtype])
    except ValueError as error:
        raise CheckpointError(
            f"{settings.name_or_path} is not a causal language model", got=summary_of(error)
        ) from error
    return TargetAdapter(model.eval().requires_grad_(False))


def drafter_on_meta(settings: TrainSettings, target: TargetAdapter) -> JakiroDrafter:
    config = config_for(settings.drafter, record_target(target.spec, settings.target.name_or_path))
    with torch.device("meta"):
        return JakiroDrafter(config)


def simulate(settings: TrainSettings, target: TargetAdapter) -> Simulation:
    """Return the memory and the operations that one micro-batch of a run needs.

    The simulated attention stores its scores, as real attention does if no fused kernel supports
    the masks and heads.
    """
    dtype = TORCH_DTYPES[settings.engine.dtype]
    drafter = drafter_on_meta(settings, target)
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(dtype)
    for parameter in module.parameters():  # gradients are counted in `StateBytes` instead
        parameter.grad = torch.zeros_like(parameter)
    reader = TargetReader(target, drafter, settings.data.sequence_length, dtype)
    batch = _batch_on_meta(settings)
    flops = FlopCounterMode(display=False)
    with LiveBytes() as live, flops:
        view = reader.view(batch)
        target_states, target_flops = live.now, flops.get_total_flops()
        module(view, batch, reader).total.backward()
    return Simulation(
        target_states=target_states,
        activations=live.peak - target_states,
        target_flops=target_flops,
        drafter_flops=flops.get_total_flops() - target_flops,
    )


def _batch_on_meta(settings: TrainSettings) -> Batch:
    size, length = settings.batch.micro_batch_size, settings.data.sequence_length
    rule, is_block = anchor_rule(settings), settings.drafter.trunk.is_block
    num_roots = min(rule.num_roots or length, length) if is_block else 0
    with torch.device("meta"):
        ids = torch.zeros(size, length, dtype=torch.long)
        return Batch(
            token_ids=ids,
            positions=ids,
            documents=ids,
            is_response=torch.ones(size, length, dtype=torch.bool),
            anchors=torch.zeros(size, rule.num_samples, length, dtype=torch.long),
            is_narrow=torch.zeros(size, dtype=torch.bool),
            roots=torch.zeros(size, num_roots, dtype=torch.long),
        )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
