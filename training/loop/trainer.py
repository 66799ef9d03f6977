"""Optimizer steps of the drafter in the DeepSpeed engine, which does not contain the target."""

from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from training.config import TrainSettings
from training.data.sampler import Sampler
from training.distributed.deepspeed_config import build_deepspeed_config
from training.distributed.failures import FiniteWatch
from training.distributed.processes import Processes, import_deepspeed
from training.loop.optimizer import build_optimizer, learning_rate, set_learning_rate
from training.loss.batch import Batch
from training.module import Meter, TargetReader, TrainingModule
from training.setup.adapters import add_adapters, merged


class Trainer:
    """Takes optimizer steps whose result does not depend on the number of processes.

    The loss is a sum over positions, divided by the number of positions with a loss in the whole
    step. This number is a sum over all micro-batches and processes, which may contain unequal
    numbers of such positions.
    """

    def __init__(
        self,
        drafter: JakiroDrafter,
        reader: TargetReader,
        sampler: Sampler,
        settings: TrainSettings,
        processes: Processes,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._processes = processes
        self._num_steps = settings.with_steps(sampler.num_sequences).num_steps
        self._accumulation = settings.batch.accumulation(processes.count)
        self._reader = reader
        self.engine = _build_engine(drafter, settings, processes)
        self._norm: Tensor | float = 0.0
        self._watch = FiniteWatch(sampler, settings, processes)
        self.meter = Meter(
            processes,
            1 + settings.drafter.schedule.parallel_levels,
            settings.drafter.experts.num_experts,
        )

    def step(self, number: int, elapsed: float = 0.0) -> float:
        """Take an optimizer step, and return its learning rate."""
        batches = self._batches(number)
        # DeepSpeed averages over micro-batches and processes, but the loss is a sum over them.
        share = self._processes.count * self._accumulation / self._count_positions(batches.values())
        rate = learning_rate(self._settings.optimizer, number, self._num_steps, elapsed)
        set_learning_rate(self.engine.optimizer, rate)
        for first_sequence, batch in batches.items():
            self._accumulate(first_sequence, batch, share)
        self._watch.close(number, self._norm)
        return rate

    def require_finite(self, latest: Callable[[], Path | None], *, is_last: bool) -> None:
        """Raise an error on all processes if the loss or gradient of a step was not finite.

        See `FiniteWatch.require_finite`.
        """
        self._watch.require_finite(latest, is_last=is_last)

    def _accumulate(self, first_sequence: int, batch: Batch, share: Tensor) -> None:
        """Add the gradient of a micro-batch; after the last one, the engine takes the step."""
        on_device = batch.to(self._processes.device)
        terms = self.engine(self._reader.view(on_device), on_device, self._reader)
        self._watch.add(first_sequence, terms.total)
        self.engine.backward(terms.total * share)
        self.meter.add(terms, int((batch.documents >= 0).sum()))
        is_last = self.engine.is_gradient_accumulation_boundary()
        norm = self._local_norm() if is_last else None  # the step deletes the gradients
        self.engine.step()
        if norm is not None:
            global_norm = self.engine.get_global_grad_norm()
            self._norm = norm if global_norm is None else global_norm

    @property
    def facts(self) -> dict[str, float | None]:
        """The gradient norm of the last step before clipping and, with fp16, the loss scale.

        The norm is None if DeepSpeed skipped the step because of an overflow in fp16.
        """
        norm = float(self._norm)
        if not self.engine.fp16_enabled():
            return {"gradient_norm": norm}
        known = norm if isfinite(norm) else None
        return {
            "gradient_norm": known,
            "loss_scale": float(self.engine.optimizer.loss_scaler.cur_scale),
        }

    def copy_drafter(self) -> JakiroDrafter:
        """Return an unpartitioned copy of the drafter, with adapters merged, on every process.

        All processes must call this method.
        """
        whole: Any = merged(self.copy_as_trained())
        return whole.to(self._processes.device, self._reader.dtype)

    def copy_as_trained(self) -> JakiroDrafter:
        """Return an unpartitioned copy of the drafter; any adapters are not merged.

        All processes must call this method.
        """
        source = self.engine.module.drafter
        gathered = import_deepspeed().zero.GatheredParameters(
            list(source.parameters()), enabled=self.engine.zero_optimization_stage() == 3
        )
        copy = JakiroDrafter(source.config)
        if self._settings.lora is not None:
            add_adapters(copy, self._settings.lora)
        with gathered:
            copy.load_state_dict({name: part.clone() for name, part in source.state_dict().items()})
        return copy

    def _local_norm(self) -> Tensor | float:
        """Return the norm of this process's gradients, which is used if they are not partitioned.

        If the gradients are partitioned, the engine reports their norm.
        """
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return get_total_norm(gradients) if gradients else 0.0

    def _batches(self, step: int) -> dict[int, Batch]:
        """Return this process's micro-batches, by the index of their first sequence in the step."""
        return self._sampler.micro_batches(
            step, self._settings.batch.micro_batch_size, self._processes.rank, self._processes.count
        )

    def _count_positions(self, batches: Iterable[Batch]) -> Tensor:
        count = sum(count_positions(batch) for batch in batches)
        total = torch.tensor(float(count), device=self._processes.device)
        return self._processes.sum(total).clamp(min=1.0)


def count_positions(batch: Batch) -> int:
    """Return how many positions have a loss, summed over anchor samples; see `gather_examples`."""
    distance = torch.arange(batch.token_ids.shape[1]) - batch.anchors
    return int((batch.targets_exist(1)[:, None] & (distance >= 1)).sum())


def _build_engine(drafter: JakiroDrafter, settings: TrainSettings, processes: Processes) -> Any:
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(processes.device)
    try:
        engine, *_ = import_deepspeed().initialize(
            model=module,
            optimizer=build_optimizer(module, settings.optimizer),
            config=build_deepspeed_config(settings, processes.count),
            dist_init_required=False,
        )
    except ValueError as error:
        if "is not supported" not in str(error):
            raise
        raise ConfigError(f"{error}; remedy: choose engine.dtype bf16 or fp32") from error
    return engine
