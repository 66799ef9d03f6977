"""Estimate of a run's memory, disk space and time from its settings and the target's config."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from jakiro.errors import ConfigError
from jakiro.utils.pretrained import TORCH_DTYPES, Kind
from jakiro.utils.wording import counted
from training.config import TrainSettings
from training.module import TrainingModule
from training.planning.simulation import Simulation, drafter_on_meta, simulate, target_on_meta
from training.planning.zero_memory import StateBytes, state_bytes
from training.setup.adapters import add_adapters
from training.setup.preparation import count_steps
from training.target_states.plan import ExpectedBytes, expected_bytes

USABLE = 0.9  # fraction of a device's memory; the rest is left for runtime and fragmentation
_CHECKPOINT_BYTES = 12  # bytes per parameter: weight and two moments in fp32


@dataclass(frozen=True)
class Estimate:
    """Memory and operations that one process of a run needs, and disk space of the whole run.

    Attributes:
        settings: settings of the run, with the number of steps.
        num_processes: number of processes of the run.
        parameters: number of trainable parameters of the drafter.
        frozen: number of frozen parameters of the drafter; 0 unless only adapters are trained.
        target: bytes of the target's weights, all of which every process keeps.
        states: bytes of the drafter's parameters, gradients and optimizer states.
        micro_batch: memory and operations of one micro-batch, computed as if all parameters were
            trained.
        shards: bytes of the target states on disk; 0 if the run does not read any from disk.
        draft_vocab_size: number of tokens that may be drafted, or the largest possible number if
            the training data determine it; None if all tokens may be drafted.
    """

    settings: TrainSettings
    num_processes: int
    parameters: int
    frozen: int
    target: int
    states: StateBytes
    micro_batch: Simulation
    shards: ExpectedBytes
    draft_vocab_size: int | None

    @property
    def device_bytes(self) -> int:
        """The peak memory of the device in bytes; an upper bound if some positions have no loss."""
        work = self.micro_batch.target_states + self.micro_batch.activations
        return self.target + self.states.device + work

    @property
    def host_bytes(self) -> int:
        """The bytes of main memory that one process needs to load the target and offload states."""
        return self.target + self.states.host

    @property
    def disk_bytes(self) -> int:
        """The peak number of bytes on disk of target states, drafters and checkpoints."""
        return self.shards.size + disk_bytes(self.parameters, self.settings, self.frozen)

    @property
    def flops(self) -> int:
        """The floating-point operations of an optimizer step on one process."""
        flops = self.micro_batch.drafter_flops
        if self.shards.size == 0:  # the target runs during training
            flops += self.micro_batch.target_flops
        return flops * self.settings.batch.accumulation(self.num_processes)

    @property
    def tokens(self) -> int:
        """The number of tokens that the run reads, including padding."""
        return (
            self.settings.num_steps
            * self.settings.batch.global_batch_size
            * self.settings.data.sequence_length
        )


def estimate(settings: TrainSettings, num_processes: int, device: Kind | None = None) -> Estimate:
    """Return an estimate of the memory, disk space and operations that a run needs.

    Args:
        settings: settings of the run; if they set `epochs`, the data is read to count the steps.
        num_processes: number of processes of the run.
        device: kind of device that the run is planned for; None for the device of this machine.

    Raises:
        ConfigError: the settings do not fit the target, the target's context is shorter than a
            sequence, or a batch cannot be divided evenly among the processes.
        CheckpointError: the target's config cannot be read.
        TargetNotSupported: the target is not supported.
    """
    settings = count_steps(settings)
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
        parameters=sum(part.numel() for part in drafter.parameters() if part.requires_grad),
        frozen=sum(part.numel() for part in drafter.parameters() if not part.requires_grad),
        target=sum(part.nbytes for part in target.model.parameters()),
        states=state_bytes(module, settings, num_processes, device),
        micro_batch=simulate(settings, target),
        shards=expected_bytes(settings, config, target.spec),
        draft_vocab_size=config.draft_vocab_size,
    )


def choose_micro_batch(
    settings: TrainSettings, num_processes: int, memory: int, device: Kind | None = None
) -> TrainSettings:
    """Return the settings with the largest micro-batch that fits into a device's memory.

    Args:
        settings: settings of the run; `batch.micro_batch_size` is ignored.
        num_processes: number of processes of the run.
        memory: bytes of memory of a device.
        device: kind of device, as for `estimate`.

    Raises:
        ConfigError: a batch cannot be divided evenly among the processes, or a single sequence does
            not fit.
    """
    own = with_micro_batch(settings, 1).batch.accumulation(num_processes)
    sizes = [size for size in range(1, own + 1) if own % size == 0]
    with_length = count_steps(settings)

    def needed(size: int) -> int:
        return estimate(with_micro_batch(with_length, size), num_processes, device).device_bytes

    num_fitting = bisect_right(sizes, int(USABLE * memory), key=needed)
    if not num_fitting:
        raise ConfigError(
            "a micro-batch of one sequence does not fit into the device's memory",
            expected=f"at most {USABLE:.0%} of {size_text(memory)}",
            got=size_text(needed(1)),
            remedy="lower objective.chunk_size or data.sequence_length, raise engine.zero_stage, "
            "or set engine.offload_optimizer=true (which needs engine.zero_stage 1 or higher)",
        )
    return with_micro_batch(settings, sizes[num_fitting - 1])


def with_micro_batch(settings: TrainSettings, size: int) -> TrainSettings:
    """Return the settings with a new micro-batch size.

    Args:
        settings: settings of a run.
        size: number of sequences that a process reads at a time.
    """
    return settings.model_copy(
        update={"batch": settings.batch.model_copy(update={"micro_batch_size": size})}
    )


def disk_bytes(parameters: int, settings: TrainSettings, frozen: int = 0) -> int:
    """Return the peak number of bytes that drafters and checkpoints take on disk.

    The peak is reached while a checkpoint is written.

    Args:
        parameters: number of trainable parameters.
        settings: settings of the run, with the number of steps.
        frozen: number of frozen parameters.
    """
    drafter = (parameters + frozen) * TORCH_DTYPES[settings.engine.dtype].itemsize
    every = settings.checkpoint.every
    written = 0 if every is None else math.ceil(settings.num_steps / every)
    checkpoints = min(written, settings.checkpoint.keep + 1)
    drafters = 1 + 2 * settings.keeps_best  # the best drafter exists twice while it is replaced
    return drafters * drafter + checkpoints * _CHECKPOINT_BYTES * parameters


def duration_text(minutes: float) -> str:
    """Return a duration as text, in minutes or hours."""
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def size_text(count: int) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10_000 else f"{mebibytes / 1024:,.1f} GiB"


def render(found: Estimate, memory: int, flops_per_second: float | None) -> Table:
    """Return the table that `jakiro train --dry-run` prints.

    Args:
        found: estimate to be printed.
        memory: bytes of memory of a device.
        flops_per_second: floating-point operations per second of large matrix products on a device;
            None if it is unknown.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_footer=True)
    total = f"{size_text(found.device_bytes)} of {size_text(memory)}"
    table.add_column("estimate", "peak memory of each device, at most")
    table.add_column("", total, justify="right")
    for name, value in _rows(found, flops_per_second).items():
        table.add_row(name, value)
    return table


def _parameters(found: Estimate) -> str:
    trained = f"{found.parameters:,} parameters"
    return f"{trained} and {found.frozen:,} frozen parameters" if found.frozen else trained


def _rows(found: Estimate, flops_per_second: float | None) -> dict[str, str]:
    states, batch = found.states, found.settings.batch
    processes = counted(found.num_processes, "process", "processes")
    sizes = f"{batch.micro_batch_size} of {batch.global_batch_size} sequences"
    return {
        "target": size_text(found.target),
        f"drafter, {_parameters(found)}": size_text(states.parameters),
        **_draft_vocabulary(found),
        "gradients": size_text(states.gradients),
        "optimizer states": size_text(states.optimizer),
        "buffers of DeepSpeed": size_text(states.buffers),
        "of the above, in main memory": size_text(states.host),
        "states and cache of the target": size_text(found.micro_batch.target_states),
        "activations": size_text(found.micro_batch.activations),
        "a micro-batch": f"{sizes}, {processes}",
        "main memory of a process while loading": size_text(found.host_bytes),
        **_shards(found),
        "disk, total": size_text(found.disk_bytes),
        "optimizer steps": f"{found.settings.num_steps:,}",
        "tokens read": f"{found.tokens:,}",
        "an optimizer step": f"{found.flops / 1e12:,.2f} TFLOP",
        **_time(found, flops_per_second),
    }


def _draft_vocabulary(found: Estimate) -> dict[str, str]:
    if found.draft_vocab_size is None:
        return {}
    size = f"{found.draft_vocab_size:,} tokens"
    if found.settings.drafter.draft_vocab_size == "auto":
        return {"draft vocabulary (auto), at most": size}
    return {"draft vocabulary": size}


def _shards(found: Estimate) -> dict[str, str]:
    size, is_exact = found.shards
    name = "target states on disk" if is_exact else "target states on disk for these steps, at most"
    return {name: size_text(size)} if size else {}


def _time(found: Estimate, flops_per_second: float | None) -> dict[str, str]:
    if flops_per_second is None:
        return {"time": "needs --device-speed"}
    minutes = found.settings.num_steps * found.flops / flops_per_second / 60
    limit, rate = found.settings.minutes, f"{flops_per_second / 1e12:,.2f} TFLOP/s"
    if limit is not None and limit < minutes:
        return {f"time at {rate}, limited by minutes": duration_text(limit)}
    return {f"time at {rate}, at least": duration_text(minutes)}
