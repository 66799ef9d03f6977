"""Optimizer steps of the drafter in the DeepSpeed engine, which does not contain the target."""

from collections.abc import Iterable
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, NumericalError
from jakiro.utils.devices import choose_device, native_dtype
from training.config import TrainSettings
from training.data.sampler import Sampler
from training.loop.optimizer import build_optimizer, learning_rate, set_learning_rate
from training.loss.batch import Batch
from training.module import Meter, TargetReader, TrainingModule
from training.processes import Processes, import_deepspeed
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
        # The first step whose loss is not finite, and the first whose gradient is not.
        self._first_broken = torch.full((2,), inf, device=processes.device)
        self.meter = Meter(
            processes,
            1 + settings.drafter.schedule.parallel_levels,
            settings.drafter.experts.num_experts,
        )

    def step(self, number: int, elapsed: float = 0.0) -> float:
        batches = self._sampler.micro_batches(
            number,
            self._settings.batch.micro_batch_size,
            self._processes.rank,
            self._processes.count,
        )
        # DeepSpeed averages over micro-batches and processes, but the loss is a sum over them.
        share = self._processes.count * self._accumulation / self._count_positions(batches)
        rate = learning_rate(self._settings.optimizer, number, self._num_steps, elapsed)
        set_learning_rate(self.engine.optimizer, rate)
        for batch in batches:
            self._accumulate(number, batch, share)
        # In fp16, gradients may overflow. DeepSpeed then skips the step and lowers the loss scale.
        if not self.engine.fp16_enabled():
            norm = torch.as_tensor(self._norm).detach()
            self._note(number, 1, norm.isfinite() & (norm >= 0))  # DeepSpeed's -1: not finite
        return rate

    def require_finite(self, latest: Path | None) -> None:
        """Raise an error if the loss or gradient of a step so far is not finite.

        All processes must call this method, which waits for the device.
        """
        firsts = self._processes.gather(self._first_broken.tolist())
        of_loss, of_gradient = (min(column) for column in zip(*firsts, strict=True))
        if (step := min(of_loss, of_gradient)) < inf:
            raise NumericalError(
                f"the {'loss' if of_loss == step else 'gradient'} of step {step + 1:.0f} is not "
                "finite",
                # The same settings would fail again, unless the device was at fault.
                remedy="start a run in another run_folder with a lower optimizer.learning_rate "
                "or with optimizer.max_grad_norm set; if the device may be at fault, start the "
                "same run again, which repeats the steps since the last good checkpoint: "
                f"{latest or 'none yet'}",
            )

    def _note(self, step: int, kind: int, is_finite: Tensor) -> None:
        """Note a step unless it is finite, without waiting for the device."""
        first = self._first_broken[kind]
        first.copy_(torch.where(is_finite, first, first.clamp(max=step)))

    def _accumulate(self, number: int, batch: Batch, share: Tensor) -> None:
        """Add the gradient of a micro-batch; after the last one, the engine takes the step."""
        on_device = batch.to(self._processes.device)
        terms = self.engine(self._reader.view(on_device), on_device, self._reader)
        self._note(number, 0, terms.total.detach().isfinite())
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
        return {
            "gradient_norm": norm if isfinite(norm) else None,
            "loss_scale": float(self.engine.optimizer.loss_scaler.cur_scale),
        }

    def copy_drafter(self) -> tuple[JakiroDrafter, JakiroDrafter]:
        """Return unpartitioned copies of the drafter: with adapters merged, and with any adapters.

        All processes must call this method. Of the second copy, only the adapters are usable.
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
        whole: Any = merged(copy)
        return whole.to(self._processes.device, self._reader.dtype), copy

    def _local_norm(self) -> Tensor | float:
        """Return the norm of this process's gradients, which is used if they are not partitioned.

        If the gradients are partitioned, the engine reports their norm.
        """
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return get_total_norm(gradients) if gradients else 0.0

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
    autocast = settings.engine.autocast
    if autocast == "auto":
        autocast = native_dtype(processes.device) is torch.bfloat16
    autocast = autocast and settings.engine.dtype == "fp32"
    module = TrainingModule(drafter, settings.objective, recompute, autocast=autocast)
    module.to(processes.device)
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


def build_deepspeed_config(
    settings: TrainSettings, num_processes: int, device: str | None = None
) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run.

    The configuration names no optimizer, because a torch optimizer is passed to DeepSpeed as an
    object, even if the optimizer states are offloaded to main memory. DeepSpeed's own CPU optimizer
    would have to compile an extension for vectorization, but torch's fused AdamW is already
    vectorized.

    Args:
        device: "cpu" or "cuda"; None for the device that `engine.device` selects on this machine.
    """
    batch, engine = settings.batch, settings.engine
    # Without ZeRO, DeepSpeed's optimizer for half precision takes a step with empty gradients when
    # it is built. That step would spoil Adam's bias correction.
    stage = engine.zero_stage if engine.dtype == "fp32" else max(engine.zero_stage, 1)
    is_gpu = (device or choose_device(engine.device).type) == "cuda"
    parts = {"optimizer": engine.offload_optimizer, "param": engine.offload_parameters}
    main_memory = {"device": "cpu", "pin_memory": is_gpu}
    offloaded = {f"offload_{name}": main_memory for name, is_wanted in parts.items() if is_wanted}
    return {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation(num_processes),
        "gradient_clipping": settings.optimizer.max_grad_norm,
        "zero_optimization": {"stage": stage} | offloaded,
        "bf16": {"enabled": engine.dtype == "bf16"},
        "fp16": {"enabled": engine.dtype == "fp16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
