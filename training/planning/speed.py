"""The device that a run is planned for, and measurements of this machine's speed."""

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from inference.benchmark.timing import medians
from inference.decoder import SpeculativeDecoder
from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import TORCH_DTYPES, Kind, choose_device, missing_gpu
from training.config import TrainSettings, anchor_rule
from training.data.sampler import Sampler
from training.loop.optimizer import build_optimizer
from training.loss.batch import Batch
from training.module import TargetReader, TrainingModule
from training.setup.adapters import add_adapters
from training.setup.preparation import RunInputs
from training.target_states.store import TargetStateStore, open_target_states

_logger = get_logger(__name__)

_REPEATS = 3  # timed repetitions, after one repetition that is not timed
_TOKENS = 32  # number of tokens that are decoded to measure the decoding rate
_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of a large matrix


def decoding_rate(inputs: RunInputs) -> float:
    """Return the tokens per second of autoregressive decoding, excluding prefill."""
    sequence = inputs.sequences.sequence(0).token_ids.tolist()
    prompt = sequence[: max(1, len(sequence) // 2)]
    count = min(_TOKENS, inputs.target.spec.max_position - len(prompt))
    decoder = SpeculativeDecoder(inputs.target.model, tokenizer=inputs.tokenizer)
    # The number of tokens is fixed, because the rate of a single token cannot be measured.
    fixed: dict[str, Any] = {"min_new_tokens": count, "max_new_tokens": count}
    fixed |= {"temperature": 0.0, "seed": 0}
    decoder.generate(prompt, **fixed)  # not measured, because the first call is slower
    return decoder.generate(prompt, **fixed).stats.tokens_per_second


def seconds_per_step(inputs: RunInputs, device: torch.device) -> float:
    """Return the seconds that an optimizer step takes, with all its micro-batches and the update.

    Args:
        inputs: inputs of the run.
        device: device to be measured.

    Raises:
        ConfigError: the sequences of a step cannot be divided into micro-batches evenly.
    """
    settings = inputs.settings
    accumulation = settings.batch.accumulation(1)
    dtype = TORCH_DTYPES[settings.engine.dtype]
    with torch.random.fork_rng(devices=[]):
        drafter = inputs.build_drafter()
        if settings.lora is not None:
            add_adapters(drafter, settings.lora, settings.seed)
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(device, dtype)
    length, states = settings.data.sequence_length, _target_states(inputs)
    reader = TargetReader(inputs.target, drafter, length, dtype, states)
    optimizer = build_optimizer(module, settings.optimizer)
    batch = sample_batch(inputs).to(device)

    def micro_batch() -> None:
        module.zero_grad()  # before the backward pass, so that the update always has gradients
        module(reader.view(batch), batch, reader).total.backward()

    seconds = medians({"micro-batch": micro_batch, "update": optimizer.step}, _REPEATS)
    return accumulation * seconds["micro-batch"] + seconds["update"]


def _target_states(inputs: RunInputs) -> TargetStateStore | None:
    """Return the states that the run would read; None if it would run the target.

    Before the states are written, the target is timed instead.
    """
    try:
        return open_target_states(inputs)
    except CheckpointError as error:
        _logger.warning(f"the target runs for this estimate: {error}")
        return None


def sample_batch(inputs: RunInputs) -> Batch:
    """Return the first micro-batch that one process would read."""
    batch = inputs.settings.batch
    sampler = Sampler(
        inputs.sequences,
        sequences_per_step=batch.global_batch_size,
        rule=anchor_rule(inputs.settings),
        seed=inputs.settings.seed,
    )
    return sampler.batch(0, 0, batch.micro_batch_size)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product.

    Other work on the device reaches at most about this rate.

    Args:
        device: device to be measured.
        dtype: dtype of the matrices.
    """
    size = _PRODUCT[device.type]
    factor = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / medians({"product": lambda: factor @ factor}, _REPEATS)["product"]


@dataclass(frozen=True)
class PlannedDevice:
    """The device of each process of a planned run.

    Attributes:
        kind: kind of the device.
        is_here: whether this machine has the device.
        memory: bytes of memory of the device; None to query the device of this machine.
    """

    kind: Kind
    is_here: bool
    memory: int | None = None

    def memory_for(self, num_local: int) -> int:
        """Return the bytes of memory that are available to a process.

        Args:
            num_local: number of processes on a machine, which share the machine's main memory.
        """
        if self.memory is not None:
            return self.memory
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(choose_device("cuda")).total_memory)
        return int(psutil.virtual_memory().total) // num_local

    def product_rate(self, settings: TrainSettings) -> float | None:
        """Return the device's `product_rate`; None if this machine does not have the device."""
        if not self.is_here:
            return None
        return product_rate(choose_device(self.kind), TORCH_DTYPES[settings.target.dtype])


def present_device(settings: TrainSettings, memory: int | None = None) -> PlannedDevice:
    """Return the device that a run uses on this machine.

    Args:
        settings: settings of the run.
        memory: bytes of memory that may be used; None for all memory.

    Raises:
        ConfigError: `engine.device` is cuda, and this machine has no GPU.
    """
    kind: Kind = "cuda" if choose_device(settings.engine.device).type == "cuda" else "cpu"
    return PlannedDevice(kind, is_here=True, memory=memory)


def plan_device(settings: TrainSettings, memory: int | None = None) -> PlannedDevice:
    """Return the device that a run would use, on this machine or on another machine.

    Args:
        settings: settings of the run.
        memory: bytes of memory of the device; None for all memory of this machine's device. If the
            memory is given, this machine has no GPU, and `engine.device` is not cpu, then the
            device is a GPU in another machine.

    Raises:
        ConfigError: `engine.device` is cuda, this machine has no GPU, and `memory` is None.
    """
    wanted = settings.engine.device
    if wanted == "cpu" or torch.cuda.is_available():
        return present_device(settings, memory)
    if wanted == "cuda" and memory is None:
        raise ConfigError(
            "engine.device is cuda, but there is no GPU for which the run could be planned",
            expected="a GPU that torch can use, or the memory of a GPU on another machine",
            got=missing_gpu(),
            remedy="pass --device-memory (and --device-speed to estimate the time), or set "
            "engine.device to cpu or auto",
        )
    is_elsewhere = memory is not None
    return PlannedDevice("cuda" if is_elsewhere else "cpu", not is_elsewhere, memory)
