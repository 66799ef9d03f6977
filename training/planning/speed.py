"""How fast this machine is: seconds of steps that are taken, and of large matrix products."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from inference.benchmark.timing import medians
from inference.decoder import SpeculativeDecoder
from jakiro.errors import ConfigError
from training.config import TrainSettings, anchor_rule
from training.data.sampler import Sampler
from training.distributed.processes import Kind, choose_device, missing_gpu
from training.input_settings import TORCH_DTYPES
from training.loop.optimizer import build_optimizer
from training.loss.batch import Batch
from training.module import TargetReader, TrainingModule
from training.setup.preparation import Prepared

_REPEATS = 3  # of what is timed, after one time that is not
_TOKENS = 32  # decoded to know the rate
_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of a large matrix


def decoding_rate(inputs: Prepared) -> float:
    """Return tokens per second of decoding without a drafter, after the prompt is read."""
    row = inputs.rows.row(0).token_ids.tolist()
    prompt = row[: max(1, len(row) // 2)]
    count = min(_TOKENS, inputs.target.spec.max_position - len(prompt))
    decoder = SpeculativeDecoder(inputs.target.model, tokenizer=inputs.tokenizer)
    # With a smallest number, for one token that ends the text has no rate.
    fixed: dict[str, Any] = {"min_new_tokens": count, "max_new_tokens": count}
    fixed |= {"temperature": 0.0, "seed": 0}
    decoder.generate(prompt, **fixed)  # the first time is slower
    return decoder.generate(prompt, **fixed).stats.tokens_per_second


def seconds_per_step(inputs: Prepared, device: torch.device) -> float:
    """Return the seconds of an optimizer step: its micro-batches, and the update.

    Raises:
        ConfigError: the rows of a step cannot be shared out evenly.
    """
    settings = inputs.settings
    accumulation = settings.batch.accumulation(1)
    dtype = TORCH_DTYPES[settings.engine.dtype]
    with torch.random.fork_rng(devices=[]):
        drafter = inputs.build_drafter()
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(device, dtype)
    reader = TargetReader(inputs.target, drafter, settings.data.sequence_length, dtype)
    optimizer = build_optimizer(module, settings.optimizer)
    batch = sample_batch(inputs).to(device)

    def micro_batch() -> None:
        module.zero_grad()  # here, so that there always are gradients to update with
        module(reader.view(batch), batch, reader).total.backward()

    seconds = medians({"micro-batch": micro_batch, "update": optimizer.step}, _REPEATS)
    return accumulation * seconds["micro-batch"] + seconds["update"]


def sample_batch(inputs: Prepared) -> Batch:
    """Return the first micro-batch that one process would read."""
    batch = inputs.settings.batch
    sampler = Sampler(
        inputs.rows,
        rows_per_step=batch.global_batch_size,
        rule=anchor_rule(inputs.settings),
        seed=inputs.settings.seed,
    )
    return sampler.batch(0, 0, batch.micro_batch_size)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return floating-point operations per second of a large matrix product, the most there is."""
    size = _PRODUCT[device.type]
    factor = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / medians({"product": lambda: factor @ factor}, _REPEATS)["product"]


@dataclass(frozen=True)
class PlannedDevice:
    """Each process's device.

    Attributes:
        kind: what it is.
        is_here: whether this machine has it.
        memory: bytes of it that are given; None for those of this machine's.
    """

    kind: Kind
    is_here: bool
    memory: int | None = None

    def memory_for(self, num_local: int) -> int:
        """Return the bytes of memory that a process has.

        Args:
            num_local: processes on a machine, which share its main memory.
        """
        if self.memory is not None:
            return self.memory
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(choose_device("cuda")).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local

    def product_rate(self, settings: TrainSettings) -> float | None:
        """Return floating-point operations per second of large products, if it can be measured."""
        if not self.is_here:
            return None
        return product_rate(choose_device(self.kind), TORCH_DTYPES[settings.target.dtype])


def present_device(settings: TrainSettings, memory: int | None = None) -> PlannedDevice:
    """Return the device that a run has on this machine.

    Args:
        settings: of the run.
        memory: bytes of it that may be used, if not all.

    Raises:
        ConfigError: a GPU is asked for where there is none.
    """
    kind: Kind = "cuda" if choose_device(settings.engine.device).type == "cuda" else "cpu"
    return PlannedDevice(kind, is_here=True, memory=memory)


def plan_device(settings: TrainSettings, memory: int | None = None) -> PlannedDevice:
    """Return the device that a run would have, here or elsewhere.

    Args:
        settings: of the run.
        memory: bytes of a device elsewhere; that is a GPU, unless `engine.device` is cpu.

    Raises:
        ConfigError: a GPU is asked for where there is none, and nothing is said of another one.
    """
    wanted = settings.engine.device
    if wanted == "cpu" or torch.cuda.is_available():
        return present_device(settings, memory)
    if wanted == "cuda" and memory is None:
        raise ConfigError(
            "engine.device is cuda, and there is no GPU that the run could be planned for",
            expected="a GPU that torch can use, or figures of one elsewhere",
            got=missing_gpu(),
            remedy="give --device-memory, and --device-speed for the time; or choose the device "
            "cpu or auto",
        )
    is_elsewhere = memory is not None
    return PlannedDevice("cuda" if is_elsewhere else "cpu", not is_elsewhere, memory)
