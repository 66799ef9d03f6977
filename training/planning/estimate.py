"""What a run would take, from its settings and the target's config alone: no weights, no data."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from jakiro.errors import ConfigError
from training.config import TrainSettings
from training.distributed.processes import Kind
from training.input_settings import TORCH_DTYPES
from training.module import TrainingModule
from training.planning.simulation import Simulation, drafter_on_meta, simulate, target_on_meta
from training.planning.zero_memory import StateBytes, state_bytes
from training.setup.adapters import add_adapters
from training.target_states.plan import ExpectedBytes, expected_bytes

USABLE = 0.9  # of a device's memory: the rest goes to its runtime and to fragments
_CHECKPOINT_BYTES = 12  # of a parameter: weight and two moments in fp32


@dataclass(frozen=True)
class Estimate:
    """What one process of a run needs, and what the run leaves on the disk.

    Attributes:
        settings: of the run.
        num_processes: over which its batch is shared out.
        parameters: of the drafter, trainable ones.
        frozen: those that have adapters beside them, or nothing.
        target: bytes of the target's weights, whole on every process.
        states: bytes of the drafter's parameters, gradients and optimizer states.
        micro_batch: what one micro-batch needs, were all parameters trained.
        shards: the target's features on disk, if the run reads any.
    """

    settings: TrainSettings
    num_processes: int
    parameters: int
    frozen: int
    target: int
    states: StateBytes
    micro_batch: Simulation
    shards: ExpectedBytes

    @property
    def device_bytes(self) -> int:
        """Memory of the device at the peak; an upper bound, all positions being responses."""
        work = self.micro_batch.target_states + self.micro_batch.activations
        return self.target + self.states.device + work

    @property
    def host_bytes(self) -> int:
        """Main memory of one process: what is offloaded, and the target while it is loaded."""
        return self.target + self.states.host

    @property
    def disk_bytes(self) -> int:
        """Features that it reads; what it leaves; checkpoints at the time when there are most."""
        return self.shards.size + disk_bytes(self.parameters, self.settings, self.frozen)

    @property
    def flops(self) -> int:
        """Floating-point operations of an optimizer step, on one process."""
        one = self.micro_batch.drafter_flops
        if self.settings.target_states.source == "online":
            one += self.micro_batch.target_flops
        return one * self.settings.batch.accumulation(self.num_processes)

    @property
    def tokens(self) -> int:
        """Tokens that the run reads, padding included."""
        return (
            self.settings.steps
            * self.settings.batch.global_batch_size
            * self.settings.data.sequence_length
        )


def estimate(settings: TrainSettings, num_processes: int, device: Kind | None = None) -> Estimate:
    """Return what a run would take.

    Args:
        settings: of the run.
        num_processes: over which its rows are shared out.
        device: that it is planned for; None for that of this machine.

    Raises:
        ConfigError: settings do not fit the target, its context is shorter than a row, or rows
            cannot be shared out evenly.
        CheckpointError: the target's config cannot be read.
        TargetNotSupported: the target cannot be drafted for.
    """
    target = target_on_meta(settings.target)
    settings.data.check_context(target.spec.max_position)
    drafter = drafter_on_meta(settings, target)
    if settings.lora is not None:
        add_adapters(drafter, settings.lora)
    module = TrainingModule(drafter, settings.objective, settings.engine.activation_checkpointing)
    config: Any = drafter.config
    return Estimate(
        settings=settings,
        num_processes=num_processes,
        parameters=sum(one.numel() for one in drafter.parameters() if one.requires_grad),
        frozen=sum(one.numel() for one in drafter.parameters() if not one.requires_grad),
        target=sum(one.nbytes for one in target.model.parameters()),
        states=state_bytes(module, settings, num_processes, device),
        micro_batch=simulate(settings, target),
        shards=expected_bytes(settings, config, target.spec),
    )


def choose_micro_batch(
    settings: TrainSettings, num_processes: int, memory: int, device: Kind | None = None
) -> TrainSettings:
    """Return the settings with the largest micro-batch that fits into a device's memory.

    Args:
        settings: of the run; `batch.micro_batch_size` does not matter.
        num_processes: over which its rows are shared out.
        memory: bytes of a device.
        device: as for `estimate`.

    Raises:
        ConfigError: rows cannot be shared out evenly, or not even one at a time fits.
    """
    own = with_micro_batch(settings, 1).batch.accumulation(num_processes)
    sizes = [size for size in range(1, own + 1) if own % size == 0]

    def needed(size: int) -> int:
        return estimate(with_micro_batch(settings, size), num_processes, device).device_bytes

    place = bisect_right(sizes, int(USABLE * memory), key=needed)
    if not place:
        raise ConfigError(
            "not even one row at a time fits into the device's memory",
            expected=f"at most {USABLE:.0%} of {size_text(memory)}",
            got=size_text(needed(1)),
            remedy="lower objective.chunk_size or data.sequence_length, raise engine.zero_stage, or "
            "offload",
        )
    return with_micro_batch(settings, sizes[place - 1])


def with_micro_batch(settings: TrainSettings, size: int) -> TrainSettings:
    """Return the settings with another number of rows that a process reads at a time."""
    return settings.model_copy(
        update={"batch": settings.batch.model_copy(update={"micro_batch_size": size})}
    )


def disk_bytes(parameters: int, settings: TrainSettings, frozen: int = 0) -> int:
    """Return the bytes of drafters and checkpoints, the latter while another one is written."""
    drafter = (parameters + frozen) * TORCH_DTYPES[settings.engine.dtype].itemsize
    every = settings.checkpoint.every
    written = 0 if every is None else math.ceil(settings.steps / every)
    checkpoints = min(written, settings.checkpoint.keep + 1)
    keeps_best = settings.checkpoint.keep_best and settings.evaluation.num_prompts > 0
    drafters = 1 + 2 * keeps_best  # the best one so far, while it is replaced
    return drafters * drafter + checkpoints * _CHECKPOINT_BYTES * parameters


def duration_text(minutes: float) -> str:
    """Return minutes or hours as people read them."""
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def size_text(count: int) -> str:
    """Return bytes as people read them."""
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10_000 else f"{mebibytes / 1024:,.1f} GiB"


def render(found: Estimate, memory: int, flops_per_second: float | None) -> Table:
    """Return the table that `jakiro train --dry-run` prints.

    Args:
        found: what is estimated.
        memory: bytes of a device.
        flops_per_second: of large matrix products on a device, if it is known.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_footer=True)
    total = f"{size_text(found.device_bytes)} of {size_text(memory)}"
    table.add_column("on each device", "memory at the peak, at most")
    table.add_column("", total, justify="right")
    for name, value in _rows(found, flops_per_second).items():
        table.add_row(name, value)
    return table


def _parameters(found: Estimate) -> str:
    trained = f"{found.parameters:,} parameters"
    return f"{trained} beside {found.frozen:,} frozen ones" if found.frozen else trained


def _rows(found: Estimate, flops_per_second: float | None) -> dict[str, str]:
    states, batch = found.states, found.settings.batch
    micro = f"{batch.micro_batch_size} of {batch.global_batch_size} rows, {found.num_processes} process(es)"
    return {
        "target": size_text(found.target),
        f"drafter, {_parameters(found)}": size_text(states.parameters),
        "gradients": size_text(states.gradients),
        "optimizer states": size_text(states.optimizer),
        "buffers of DeepSpeed": size_text(states.buffers),
        "of these in main memory": size_text(states.host),
        "features and cache of the target": size_text(found.micro_batch.target_states),
        "activations": size_text(found.micro_batch.activations),
        "a micro-batch": micro,
        "main memory of a process while loading": size_text(found.host_bytes),
        **_shards(found),
        "disk, all together": size_text(found.disk_bytes),
        "tokens read": f"{found.tokens:,}",
        "an optimizer step": f"{found.flops / 1e12:,.2f} TFLOP",
        **_time(found, flops_per_second),
    }


def _shards(found: Estimate) -> dict[str, str]:
    size, is_exact = found.shards
    name = "features on disk" if is_exact else "features on disk for these steps, at most"
    return {name: size_text(size)} if size else {}


def _time(found: Estimate, flops_per_second: float | None) -> dict[str, str]:
    if flops_per_second is None:
        return {"time": "with --device-speed"}
    minutes = found.settings.steps * found.flops / flops_per_second / 60
    return {f"time at {flops_per_second / 1e12:,.2f} TFLOP/s, at least": duration_text(minutes)}
