"""Simulation of one micro-batch on the meta device, to count bytes and operations.

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
from jakiro.utils.pretrained import TORCH_DTYPES, load_config
from jakiro.utils.wording import summary_of
from training.config import TrainSettings, anchor_rule
from training.input_settings import TargetSettings
from training.loss.batch import Batch
from training.module import TargetReader, TrainingModule


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
        """Run an operation and count the bytes of its new tensors."""
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
    """Memory and operations of one process for one micro-batch, if every position has a loss.

    Attributes:
        target_states: bytes of the target's states that the drafter reads, including the cache.
        activations: peak number of bytes in addition to the target's states.
    """

    target_states: int
    activations: int
    target_flops: int
    drafter_flops: int


@lru_cache(maxsize=2)
def target_on_meta(settings: TargetSettings) -> TargetAdapter:
    """Return a target without weights, built from its config."""
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
    """Return a run's drafter without weights."""
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
    samples = anchor_rule(settings).num_samples
    with torch.device("meta"):
        ids = torch.zeros(size, length, dtype=torch.long)
        return Batch(
            token_ids=ids,
            positions=ids,
            documents=ids,
            is_response=torch.ones(size, length, dtype=torch.bool),
            anchors=torch.zeros(size, samples, length, dtype=torch.long),
            is_narrow=torch.zeros(size, dtype=torch.bool),
        )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
