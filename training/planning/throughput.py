"""Throughput of training, compared with an ideal run that has only forward and backward passes.

`jakiro throughput` prints the result. Timings of real optimizer steps and of their parts are
interleaved. The ideal run does not collate or copy data, sum gradients over processes, clip
gradients or update parameters. One process is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch

from inference.benchmark.machine import device_name
from inference.benchmark.stats import median_interval
from inference.benchmark.timing import interleaved, peak_memory
from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.processor import processor
from jakiro.utils.provenance import provenance
from jakiro.utils.settings import Settings
from training.config import TrainSettings, anchor_rule
from training.data.packing import PackedSequences
from training.data.sampler import Sampler
from training.distributed.processes import join_processes, launch_environment
from training.loop.trainer import Trainer
from training.module import TargetReader
from training.planning.parts import flops_of, parts_of
from training.planning.speed import product_rate
from training.setup.adapters import add_adapters
from training.setup.preparation import RunInputs, prepare
from training.target_states.store import open_target_states

GOAL = 0.6  # smallest acceptable speed, as a fraction of the ideal run's tokens per second
RUN = "run"
_EXAMINED = 2000  # number of sequences that are read to measure the padding


class Part(Settings):
    """One part of a micro-batch, with its forward and backward passes.

    Attributes:
        seconds: median time of the part in seconds.
        tokens_per_second: tokens per second if a run consisted of this part only.
        flops: number of floating-point operations.
        flop_use: operations per second, as a fraction of the rate of large matrix products.
    """

    seconds: float
    tokens_per_second: float
    flops: int
    flop_use: float


class Throughput(Settings):
    """The measured throughput of a run, compared with that of the ideal run.

    Attributes:
        tokens_per_second: tokens per second of the real run, excluding padding.
        seconds_per_step: median time of a real optimizer step, in seconds.
        ideal_seconds_per_step: median of the summed times, in seconds, of all parts in all
            micro-batches of a step.
        ratio: median ratio of ideal to real seconds in the same repetition, and the low and high
            ends of its 95% interval.
        goal: smallest acceptable ratio.
        flop_use: operations per second of the real run, as a fraction of the rate of large
            matrix products.
        parts: parts of a micro-batch, by name.
        peak_bytes: peak memory of a step in bytes; None if it cannot be measured.
        padding: fraction of the packed tokens that is padding.
        products_per_second: floating-point operations per second of large matrix products.
        environment: machine and software versions of the measurement.
        settings: settings of the run.
    """

    tokens_per_second: float
    seconds_per_step: float
    ideal_seconds_per_step: float
    ratio: tuple[float, float, float]
    goal: float
    flop_use: float
    parts: dict[str, Part]
    peak_bytes: int | None
    padding: float
    products_per_second: float
    environment: dict[str, Any]
    settings: dict[str, Any]


@dataclass
class _Subject:
    """One process of a run, ready to take steps."""

    inputs: RunInputs
    trainer: Trainer
    reader: TargetReader
    sampler: Sampler
    device: torch.device

    @property
    def settings(self) -> TrainSettings:
        return self.inputs.settings


def measure(settings: TrainSettings, steps: int) -> Throughput:
    """Return the throughput of a run and of its parts.

    Args:
        settings: settings of the run, whose run folder is not changed.
        steps: number of timed optimizer steps; all parts are timed once alongside each step.

    Raises:
        JakiroError: the target, the data or the settings cannot be used.
    """
    with launch_environment(settings.engine.device):
        inputs = prepare(settings)
        with join_processes(settings.engine.device) as processes:
            model: Any = inputs.target.model
            model.to(processes.device)
            drafter = inputs.build_drafter()
            if settings.lora is not None:
                add_adapters(drafter, settings.lora, settings.seed)
            dtype = TORCH_DTYPES[settings.engine.dtype]
            length, states = settings.data.sequence_length, open_target_states(inputs)
            reader = TargetReader(inputs.target, drafter, length, dtype, states)
            sampler = Sampler(
                inputs.sequences,
                sequences_per_step=settings.batch.global_batch_size,
                rule=anchor_rule(settings),
                seed=settings.seed,
            )
            trainer = Trainer(drafter, reader, sampler, settings, processes)
            try:
                subject = _Subject(inputs, trainer, reader, sampler, processes.device)
                return _measured(subject, steps)
            finally:
                trainer.engine.destroy()


def summary(found: Throughput) -> list[str]:
    """Return the main figures as lines of text."""
    value, low, high = found.ratio
    peak = "unknown" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:,.0f} MiB"
    line = partial("{:8} {:10.4f} s {:12,.0f} tokens/s {:8.1%} FLOP use".format)
    return [
        *(
            line(name, part.seconds, part.tokens_per_second, part.flop_use)
            for name, part in found.parts.items()
        ),
        line("step", found.seconds_per_step, found.tokens_per_second, found.flop_use),
        f"{value:.1%} ({low:.1%} to {high:.1%}) of the ideal run's speed; the goal is {GOAL:.0%}",
        f"padding {found.padding:.1%}, peak memory {peak}",
    ]


def padding_of(sequences: PackedSequences) -> float:
    """Return the fraction of the tokens in the first 2000 sequences that is padding."""
    examined = range(min(len(sequences), _EXAMINED))
    filled = sum(int((sequences.sequence(index).documents >= 0).sum()) for index in examined)
    return 1 - filled / (len(examined) * sequences.sequence_length)


def _measured(subject: _Subject, steps: int) -> Throughput:
    settings, device = subject.settings, subject.device
    batch = subject.sampler.batch(0, 0, settings.batch.micro_batch_size).to(device)
    # A copy is used because DeepSpeed manages the gradients and hooks of the engine's drafter.
    # Adapters are not merged, so that only they are trained, as in the run.
    drafter: Any = subject.trainer.copy_as_trained()
    drafter.to(device, subject.reader.dtype)
    parts = parts_of(drafter, subject.reader, batch, settings.objective)
    numbers = count()
    seconds = interleaved({RUN: lambda: subject.trainer.step(next(numbers)), **parts}, steps)
    with peak_memory(device) as peak:
        subject.trainer.step(next(numbers))
    micro_batches = settings.batch.accumulation(1)
    ideal = [
        micro_batches * sum(taken) for taken in zip(*(seconds[name] for name in parts), strict=True)
    ]
    ratios = [best / real for best, real in zip(ideal, seconds[RUN], strict=True)]
    rate = product_rate(device, TORCH_DTYPES[settings.target.dtype])
    tokens = int((batch.documents >= 0).sum())
    of_parts = {
        name: _part(median(seconds[name]), flops_of(work), tokens, rate)
        for name, work in parts.items()
    }
    taken = median(seconds[RUN])
    flops = micro_batches * sum(part.flops for part in of_parts.values())
    return Throughput(
        tokens_per_second=micro_batches * tokens / taken,
        seconds_per_step=taken,
        ideal_seconds_per_step=median(ideal),
        ratio=median_interval(ratios),
        goal=GOAL,
        flop_use=flops / taken / rate,
        parts=of_parts,
        peak_bytes=peak.bytes,
        padding=padding_of(subject.inputs.sequences),
        products_per_second=rate,
        environment=_environment(device),
        settings=settings.model_dump(mode="json"),
    )


def _part(seconds: float, flops: int, tokens: int, rate: float) -> Part:
    return Part(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        flops=flops,
        flop_use=flops / seconds / rate,
    )


def _environment(device: torch.device) -> Mapping[str, Any]:
    facts = {"device": device_name(device), "processor": processor()}
    return provenance() | facts | {"threads": torch.get_num_threads()}
