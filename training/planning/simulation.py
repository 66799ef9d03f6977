"""One micro-batch on the meta device: what training would allocate and compute, from shapes alone.

The code that trains is what runs here, so every variant of the drafter is accounted for.
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

from jakiro.config import JakiroConfig, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from training.config import TrainSettings, anchor_rule
from training.input_settings import TORCH_DTYPES, TargetSettings
from training.loss.batch import Batch
from training.module import TargetReader, TrainingModule
from training.setup.loading import config_at


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside it, as long as they exist.

    Attributes:
        now: bytes that exist.
        peak: most bytes that existed at once.
    """

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
        """Run an operation, and note what is new."""
        for tensor in _tensors((args, kwargs)):  # what is made outside exists already
            self._known.add(tensor.untyped_storage()._cdata)
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            self._note(tensor)
        return results

    def _note(self, tensor: Tensor) -> None:
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
    """What one process needs for one micro-batch, every position of which carries a loss.

    Attributes:
        features: bytes that the target leaves to the drafter, its cache included.
        activations: bytes at the peak beside those.
        target_flops: of the target's forward.
        drafter_flops: of the drafter with its losses, forward and backward.
    """

    features: int
    activations: int
    target_flops: int
    drafter_flops: int


def target_on_meta(settings: TargetSettings) -> TargetAdapter:
    """Return a target without weights, from its config alone.

    Raises:
        CheckpointError: there is no such config.
        TargetNotSupported: the target cannot be drafted for.
    """
    return _target_on_meta(settings.name_or_path, TORCH_DTYPES[settings.dtype])


def drafter_on_meta(settings: TrainSettings, target: TargetAdapter) -> JakiroDrafter:
    """Return a run's drafter without weights.

    Raises:
        ConfigError: the settings do not fit the target.
    """
    config = config_for(settings.drafter, record_target(target.spec, settings.target.name_or_path))
    return _drafter_on_meta(config)


def simulate(settings: TrainSettings, target: TargetAdapter) -> Simulation:
    """Return what one micro-batch of a run needs.

    Attention is taken to store its scores, as it does where no fused kernel fits masks and heads.

    Args:
        settings: of the run; `batch.micro_batch_size` rows are read.
        target: from `target_on_meta`.
    """
    dtype = TORCH_DTYPES[settings.engine.dtype]
    drafter = drafter_on_meta(settings, target)
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(dtype)
    for parameter in module.parameters():  # gradients are counted with the optimizer's states
        parameter.grad = torch.zeros_like(parameter)
    reader = TargetReader(target, drafter, settings.data.sequence_length, dtype)
    batch = _batch_on_meta(settings)
    flops = FlopCounterMode(display=False)
    with LiveBytes() as live, flops:
        view = reader.view(batch)
        features, target_flops = live.now, flops.get_total_flops()
        module(view, batch, reader).total.backward()
    return Simulation(
        features=features,
        activations=live.peak - features,
        target_flops=target_flops,
        drafter_flops=flops.get_total_flops() - target_flops,
    )


@lru_cache(maxsize=2)
def _target_on_meta(name_or_path: str, dtype: torch.dtype) -> TargetAdapter:
    try:
        config = config_at(name_or_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the config of the target {name_or_path}",
            expected="a folder or hub id with the config.json of a causal language model",
            got=str(error).strip().splitlines()[0],
            remedy="check target.name_or_path",
        ) from error
    return TargetAdapter(model.eval().requires_grad_(False))


def _drafter_on_meta(config: JakiroConfig) -> JakiroDrafter:
    with torch.device("meta"):
        return JakiroDrafter(config)


def _batch_on_meta(settings: TrainSettings) -> Batch:
    rows, length = settings.batch.micro_batch_size, settings.data.sequence_length
    draws = anchor_rule(settings).draws
    with torch.device("meta"):
        return Batch(
            token_ids=torch.zeros(rows, length, dtype=torch.long),
            positions=torch.zeros(rows, length, dtype=torch.long),
            documents=torch.zeros(rows, length, dtype=torch.long),
            is_response=torch.ones(rows, length, dtype=torch.bool),
            anchors=torch.zeros(rows, draws, length, dtype=torch.long),
            is_narrow=torch.zeros(rows, dtype=torch.bool),
        )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
