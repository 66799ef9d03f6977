"""How close training comes to its bare arithmetic, and where the rest of the time goes.

`python -m training.planning.throughput --config FILE [--set KEY.PATH=VALUE ...] --out FILE.json`

Steps of the real run and its parts alone take turns. The ideal run consists of the bare forwards
and backwards and nothing else: no data to be collated and copied, no sum over processes, no clip,
no optimizer. One process is measured.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from inference.benchmark.machine import device_name, processor
from inference.benchmark.stats import median_interval
from inference.benchmark.timing import interleaved, note, peak_memory
from jakiro.errors import ConfigError, JakiroError
from jakiro.utils.files import write_atomically
from jakiro.utils.provenance import provenance
from jakiro.utils.settings import Settings, load_settings
from training.config import TrainSettings, anchor_rule
from training.data.packing import PackedRows
from training.data.sampler import Sampler
from training.distributed.processes import join_processes, launch_environment
from training.input_settings import TORCH_DTYPES
from training.loop.trainer import Trainer
from training.module import TargetReader
from training.planning.parts import flops_of, parts_of
from training.planning.speed import product_rate
from training.setup.preparation import Prepared, prepare

GOAL = 0.6  # of the ideal run's tokens per second
RUN = "run"
_ROWS_LOOKED_AT = 2000  # to know how much of them is padding


class Part(Settings):
    """One part of a micro-batch, forward and backward.

    Attributes:
        seconds: median of its time alone.
        tokens_per_second: if there were nothing else.
        flops: floating-point operations.
        flop_use: share of what large matrix products reach on this device.
    """

    seconds: float
    tokens_per_second: float
    flops: int
    flop_use: float


class Throughput(Settings):
    """What was measured.

    Attributes:
        tokens_per_second: of the real run, padding not counted.
        seconds_per_step: its median.
        ideal_seconds_per_step: the sum of all parts, for all micro-batches of a step.
        ratio: ideal over real seconds in the same round: value, low, high of its 95% interval.
        goal: the least that the ratio should be.
        flop_use: of the real run.
        parts: of a micro-batch.
        peak_bytes: memory at the peak of a step; None where it cannot be told.
        padding: share of the rows' tokens that is padding.
        products_per_second: floating-point operations of large matrix products.
        environment: where it was measured.
        settings: of the run.
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

    inputs: Prepared
    trainer: Trainer
    reader: TargetReader
    sampler: Sampler
    device: torch.device

    @property
    def settings(self) -> TrainSettings:
        return self.inputs.settings


def measure(settings: TrainSettings, steps: int) -> Throughput:
    """Return how fast a run trains, and how fast its parts are.

    Args:
        settings: of the run; its folder is not touched.
        steps: that are timed, each beside one round of the parts.

    Raises:
        JakiroError: target, data or settings cannot be used.
    """
    with launch_environment(settings.engine.device):
        inputs = prepare(settings)
        with join_processes(settings.engine.device) as processes:
            model: Any = inputs.target.model
            model.to(processes.device)
            drafter = inputs.build_drafter()
            dtype = TORCH_DTYPES[settings.engine.dtype]
            reader = TargetReader(inputs.target, drafter, settings.data.sequence_length, dtype)
            sampler = Sampler(
                inputs.rows,
                rows_per_step=settings.batch.global_batch_size,
                rule=anchor_rule(settings),
                seed=settings.seed,
            )
            trainer = Trainer(drafter, reader, sampler, settings, processes)
            try:
                subject = _Subject(inputs, trainer, reader, sampler, processes.device)
                return _measured(subject, steps)
            finally:
                trainer.engine.destroy()


def padding_of(rows: PackedRows) -> float:
    """Return the share of padding in the first rows."""
    looked_at = range(min(len(rows), _ROWS_LOOKED_AT))
    filled = sum(int((rows.row(index).documents >= 0).sum()) for index in looked_at)
    return 1 - filled / (len(looked_at) * rows.sequence_length)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; return 0 when done, 2 on bad input."""
    options = _parse(arguments)
    try:
        if options.out is not None and options.out.exists():
            raise ConfigError(f"{options.out} exists", expected="a new file for --out")
        found = measure(
            load_settings(TrainSettings, options.config, options.overrides), options.steps
        )
    except JakiroError as error:
        note(f"error: {' '.join(str(error).split())}")
        return 2
    if options.out is not None:
        write_atomically(options.out, found.model_dump_json(indent=1) + "\n")
    for line in _told(found):
        sys.stdout.write(line + "\n")
    return 0


def _measured(subject: _Subject, steps: int) -> Throughput:
    settings, device = subject.settings, subject.device
    batch = subject.sampler.batch(0, 0, settings.batch.micro_batch_size).to(device)
    # Beside the engine's own drafter, whose gradients and hooks are DeepSpeed's.
    drafter = subject.trainer.copy_drafter().requires_grad_(True)
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
        padding=padding_of(subject.inputs.rows),
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


def _told(found: Throughput) -> list[str]:
    value, low, high = found.ratio
    peak = "unknown" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:,.0f} MiB"
    line = partial("{:8} {:10.4f} s {:12,.0f} tokens/s {:8.1%} FLOP use".format)
    return [
        *(
            line(name, part.seconds, part.tokens_per_second, part.flop_use)
            for name, part in found.parts.items()
        ),
        line("step", found.seconds_per_step, found.tokens_per_second, found.flop_use),
        f"{value:.1%} ({low:.1%} to {high:.1%}) of the ideal run's speed; {GOAL:.0%} are wanted",
        f"padding {found.padding:.1%}, memory at the peak {peak}",
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how fast training is.")
    parser.add_argument("--config", type=Path, required=True, help="settings of a training run")
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY.PATH=VALUE", action="append", default=[]
    )
    parser.add_argument("--steps", type=int, default=12, help="that are timed")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="store everything here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
