"""Estimate of a run's memory, disk space and time from its settings and the target's config."""

import math
from bisect import bisect_right
from dataclasses import dataclass

import psutil
import torch
from rich import box
from rich.table import Table
from torch.utils.benchmark import Timer

from jakiro.errors import ConfigError
from jakiro.utils.devices import Kind, choose_device
from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.wording import counted
from training.config import TrainSettings
from training.module import TrainingModule
from training.planning.memory import (
    Simulation,
    StateBytes,
    drafter_on_meta,
    simulate,
    state_bytes,
    target_on_meta,
)
from training.setup.adapters import add_adapters
from training.setup.preparation import count_steps

USABLE = 0.9  # fraction of a device's memory; the rest is left for runtime and fragmentation
_CHECKPOINT_BYTES = 12  # bytes per parameter: weight and two moments in fp32
_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of a large matrix


@dataclass(frozen=True)
class Estimate:
    """Memory and operations that one process of a run needs, and disk space of the whole run.

    Attributes:
        frozen: number of frozen parameters of the drafter; 0 unless only adapters are trained.
        target: bytes of the target's weights, all of which every process keeps.
        micro_batch: memory and operations of one micro-batch, computed as if all parameters were
            trained.
    """

    settings: TrainSettings
    num_processes: int
    parameters: int
    frozen: int
    target: int
    states: StateBytes
    micro_batch: Simulation

    @property
    def device_bytes(self) -> int:
        """The peak memory of the device in bytes; an upper bound if some positions have no loss."""
        work = self.micro_batch.target_states + self.micro_batch.activations
        return self.target + self.states.device + work

    @property
    def disk_bytes(self) -> int:
        """The peak number of bytes on disk, while a checkpoint is written."""
        settings = self.settings
        dtype = TORCH_DTYPES[settings.engine.dtype]
        drafter = (self.parameters + self.frozen) * dtype.itemsize
        every = settings.checkpoint.every
        written = 0 if every is None else math.ceil(settings.num_steps / every)
        checkpoints = min(written, settings.checkpoint.keep + 1)
        drafters = 1 + 2 * settings.keeps_best  # the best drafter exists twice while it is replaced
        checkpoint = _CHECKPOINT_BYTES * self.parameters
        return drafters * drafter + checkpoints * checkpoint

    @property
    def flops(self) -> int:
        flops = self.micro_batch.drafter_flops
        if self.settings.target_states.source == "online":  # the target runs during training
            flops += self.micro_batch.target_flops
        return flops * self.settings.batch.accumulation(self.num_processes)

    @property
    def tokens(self) -> int:
        sequences = self.settings.num_steps * self.settings.batch.global_batch_size
        return sequences * self.settings.data.sequence_length

    def minutes(self, flops_per_second: float) -> float:
        """Return the smallest duration of the run at a rate of floating-point operations."""
        minutes = self.settings.num_steps * self.flops / flops_per_second / 60
        return min(minutes, self.settings.minutes or math.inf)


def estimate(settings: TrainSettings, num_processes: int, device: Kind | None = None) -> Estimate:
    """Return an estimate of the memory, disk space and operations that a run needs."""
    settings = count_steps(settings)
    target = target_on_meta(settings.target)
    settings.data.check_context(target.spec.max_position)
    drafter = drafter_on_meta(settings, target)
    if settings.lora is not None:
        add_adapters(drafter, settings.lora)
    module = TrainingModule(drafter, settings.objective, settings.engine.activation_checkpointing)
    return Estimate(
        settings=settings,
        num_processes=num_processes,
        parameters=sum(part.numel() for part in drafter.parameters() if part.requires_grad),
        frozen=sum(part.numel() for part in drafter.parameters() if not part.requires_grad),
        target=sum(part.nbytes for part in target.model.parameters()),
        states=state_bytes(module, settings, num_processes, device),
        micro_batch=simulate(settings, target),
    )


def choose_micro_batch(
    settings: TrainSettings, num_processes: int, memory: int, device: Kind | None = None
) -> TrainSettings:
    """Return the settings with the largest micro-batch that fits into a device's memory."""
    largest = _with_micro_batch(settings, 1).batch.accumulation(num_processes)
    sizes = [size for size in range(1, largest + 1) if largest % size == 0]
    with_length = count_steps(settings)

    def needed(size: int) -> int:
        return estimate(_with_micro_batch(with_length, size), num_processes, device).device_bytes

    num_fitting = bisect_right(sizes, int(USABLE * memory), key=needed)
    if not num_fitting:
        raise ConfigError(
            "a micro-batch of one sequence does not fit into the device's memory",
            expected=f"at most {USABLE:.0%} of {size_text(memory)}",
            got=size_text(needed(1)),
            remedy="lower objective.chunk_size or data.sequence_length, raise engine.zero_stage, "
            "or set engine.offload_optimizer=true (which needs engine.zero_stage 1 or higher)",
        )
    return _with_micro_batch(settings, sizes[num_fitting - 1])


def _with_micro_batch(settings: TrainSettings, size: int) -> TrainSettings:
    batch = settings.batch.model_copy(update={"micro_batch_size": size})
    return settings.model_copy(update={"batch": batch})


def duration_text(minutes: float) -> str:
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def size_text(count: int) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10_000 else f"{mebibytes / 1024:,.1f} GiB"


def planned_kind(settings: TrainSettings, device_memory: float | None) -> Kind:
    """Return the kind of device of a run.

    Args:
        device_memory: memory of the device; None for the device of this machine. If it is given,
            and this machine has no GPU, then the run is planned for a GPU of another machine.
    """
    device = settings.engine.device
    if device == "cpu" or (device_memory is None and choose_device(device).type == "cpu"):
        return "cpu"
    return "cuda"


def memory_here(kind: Kind, num_local: int) -> int:
    """Return the bytes of memory of a process; processes share the main memory of a machine."""
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(choose_device("cuda")).total_memory)
    return int(psutil.virtual_memory().total) // num_local


def product_rate(settings: TrainSettings) -> float:
    """Return the floating-point operations per second of a large matrix product on this machine.

    Other work on the device reaches at most about this rate.
    """
    device = choose_device(settings.engine.device)
    size = _PRODUCT[device.type]
    factor = torch.ones(size, size, device=device, dtype=TORCH_DTYPES[settings.target.dtype])
    names, threads = {"factor": factor}, torch.get_num_threads()
    timer = Timer("factor @ factor", globals=names, num_threads=threads)
    return 2 * size**3 / timer.timeit(3).mean


def render(run: Estimate, memory: int, flops_per_second: float | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_footer=True)
    total = f"{size_text(run.device_bytes)} of {size_text(memory)}"
    table.add_column("estimate", "peak memory of each device, at most")
    table.add_column("", total, justify="right")
    states, settings, batch = run.states, run.settings, run.settings.batch
    frozen = f" and {run.frozen:,} frozen parameters" if run.frozen else ""
    rows = {
        "target": size_text(run.target),
        f"drafter, {run.parameters:,} parameters{frozen}": size_text(states.parameters),
        "gradients": size_text(states.gradients),
        "optimizer states": size_text(states.optimizer),
        "buffers of DeepSpeed": size_text(states.buffers),
        "of the above, in main memory": size_text(states.host),
        "states and cache of the target": size_text(run.micro_batch.target_states),
        "activations": size_text(run.micro_batch.activations),
        "a micro-batch": f"{batch.micro_batch_size} of {batch.global_batch_size} sequences, "
        f"{counted(run.num_processes, 'process', 'processes')}",
        "main memory of a process while loading": size_text(run.target + states.host),
        "disk for drafters and checkpoints": size_text(run.disk_bytes),
        "optimizer steps": f"{settings.num_steps:,}",
        "tokens read": f"{run.tokens:,}",
        "an optimizer step": f"{run.flops / 1e12:,.2f} TFLOP",
    }
    if flops_per_second is not None:
        rate = f"{flops_per_second / 1e12:,.2f} TFLOP/s"
        rows[f"time at {rate}, at least"] = duration_text(run.minutes(flops_per_second))
    for name, value in rows.items():
        table.add_row(name, value)
    return table
