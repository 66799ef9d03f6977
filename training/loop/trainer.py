"""Optimizer steps of the drafter under the DeepSpeed engine, with the frozen target beside it."""

from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from jakiro.drafter import JakiroDrafter
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
    """Takes optimizer steps, which are the same on any number of processes.

    The loss is a sum over positions, divided by the number of positions that carry a loss in the
    whole step, over all micro-batches and processes, however uneven these are.

    Args:
        drafter: the drafter to train, which the engine owns from now on.
        reader: reader of the frozen target, which stays outside the engine.
        sampler: sampler of the training sequences.
        settings: settings of the run.
        processes: this process among those of the run.
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
        self._accumulation = settings.batch.accumulation(processes.count)
        self._reader = reader
        self.engine = _build_engine(drafter, settings, processes)
        self._norm: Tensor | float = 0.0
        self._watch = FiniteWatch(sampler, settings, processes)
        self.meter = Meter(processes, 1 + settings.drafter.schedule.parallel_levels)

    def step(self, number: int) -> float:
        """Take one optimizer step, counted from zero, and return its learning rate."""
        batches = self._batches(number)
        # DeepSpeed takes the mean over micro-batches and processes, but the loss is their sum.
        share = self._processes.count * self._accumulation / self._count_positions(batches.values())
        rate = learning_rate(self._settings.optimizer, number, self._settings.steps)
        set_learning_rate(self.engine.optimizer, rate)
        for first_sequence, batch in batches.items():
            self._accumulate(first_sequence, batch, share)
        self._watch.close(number, self._norm)
        return rate

    def require_finite(self, latest: Callable[[], Path | None], *, is_last: bool) -> None:
        """Raise on all processes if a step was not finite; see `FiniteWatch.require_finite`.

        Args:
            latest: function that returns the checkpoint from which the run can go on.
            is_last: whether the last step is checked, too, which waits for the device.
        """
        self._watch.require_finite(latest, is_last=is_last)

    def _accumulate(self, first_sequence: int, batch: Batch, share: Tensor) -> None:
        """Add the gradient of a micro-batch; after the last of a step the engine takes the step."""
        on_device = batch.to(self._processes.device)
        terms = self.engine(self._reader.view(on_device), on_device, self._reader)
        self._watch.add(first_sequence, terms.total)
        self.engine.backward(terms.total * share)
        self.meter.add(terms, int((batch.documents >= 0).sum()))
        norm = self._local_norm()
        self.engine.step()
        global_norm = self.engine.get_global_grad_norm()
        self._norm = norm if global_norm is None else global_norm

    @property
    def facts(self) -> dict[str, float | None]:
        """The norm of the last step's gradient before it was clipped.

        With fp16 also the loss scale; the norm is None if an overflow made DeepSpeed skip the step.
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
        """Return a copy of the drafter, whole on every process, with adapters merged.

        All processes must call this method.
        """
        whole: Any = merged(self.copy_as_trained())
        return whole.to(self._processes.device, self._reader.dtype)

    def copy_as_trained(self) -> JakiroDrafter:
        """Return a copy of the drafter with its adapters, if there are any, beside its weights.

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
        """Return the norm of unpartitioned gradients; of others the engine knows the norm."""
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
    """Return the number of positions with a loss over all anchor samples, see `gather_examples`."""
    distance = torch.arange(batch.token_ids.shape[1]) - batch.anchors
    return int((batch.targets_exist(1)[:, None] & (distance >= 1)).sum())


def _build_engine(drafter: JakiroDrafter, settings: TrainSettings, processes: Processes) -> Any:
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(processes.device)
    engine, *_ = import_deepspeed().initialize(
        model=module,
        optimizer=build_optimizer(module, settings.optimizer),
        config=build_deepspeed_config(settings, processes.count),
        dist_init_required=False,
    )
    return engine
