"""What a study would take, from a few steps of every arm; nothing is written.

Minutes and bytes are those of all trainings of an arm. One process is measured: DeepSpeed on
several devices is faster, and other work on the machine makes all of it slower.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from inference.bench.timing import medians
from inference.comparison.method_names import PLAIN
from inference.decoder import SpeculativeDecoder
from jakiro.config import config_for
from jakiro.settings import Settings
from training.ablation.equal_size import SizedArm
from training.ablation.runs import runs_of
from training.batch import Batch
from training.config import TORCH_DTYPES, TrainSettings, anchor_rule
from training.data.sampler import Sampler
from training.module import TrainingModule
from training.optimizer import build_optimizer
from training.preparation import Prepared
from training.processes import choose_device
from training.target_reader import TargetReader

_REPEATS = 3  # micro-batches that are timed, after one that is not
_TOKENS = 32  # decoded to know the rate
_MASTER_BYTES = 4  # checkpoints hold weights and optimizer states in fp32
_STATES = 3  # weights and two moments


class Estimate(Settings):
    """What one arm takes, with all seeds and all values of a sweep.

    Attributes:
        arm: its name; `plain` is decoding without a drafter, which is measured, too.
        parameters: trainable ones.
        seconds_per_step: of the optimizer, measured.
        training_minutes: of all steps of all trainings.
        evaluation_minutes: as if drafting cost nothing and won nothing.
        disk_bytes: of drafters, and of checkpoints at the time when there are most.
    """

    arm: str
    parameters: int
    seconds_per_step: float
    training_minutes: float
    evaluation_minutes: float
    disk_bytes: int


def estimate(
    sized: Sequence[SizedArm],
    inputs: Prepared,
    *,
    seeds: int,
    evaluation_tokens: int,
    sweep_runs: int = 0,
    sweep_tokens: int = 0,
) -> list[Estimate]:
    """Return what each arm would take, and plain decoding beside them.

    Args:
        sized: the arms, equally large.
        inputs: target and data, which all arms share; the target moves to the device of training.
        seeds: trainings of every arm.
        evaluation_tokens: that one arm decodes with one seed: prompts x new tokens x temperatures.
        sweep_runs: trainings of every arm beside those, to choose a value of a setting.
        sweep_tokens: that one arm decodes to choose it.

    Raises:
        ConfigError: the device is not there, or a batch cannot be shared out.
    """
    device = choose_device(inputs.settings.engine.device)
    model: Any = inputs.target.model
    model.to(device)
    rate = decoding_rate(inputs)
    decoding, choosing = (count / rate / 60 for count in (seeds * evaluation_tokens, sweep_tokens))
    # As they would be trained: a study keeps fewer checkpoints than a run of its own.
    runs = runs_of(sized, 1, inputs.settings.run_folder)
    return [
        *(
            _of_arm(
                arm,
                _with_settings(inputs, run.settings),
                device,
                seeds + sweep_runs,
                decoding + choosing,
            )
            for arm, run in zip(sized, runs, strict=True)
        ),
        Estimate(
            arm=PLAIN,
            parameters=0,
            seconds_per_step=0.0,
            training_minutes=0.0,
            evaluation_minutes=decoding,
            disk_bytes=0,
        ),
    ]


def render(estimates: Sequence[Estimate]) -> Table:
    """Return the table of all arms with the totals."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_footer=True)
    columns = {
        "arm": "all",
        "parameters": "",
        "s / step": "",
        "training": _duration(sum(one.training_minutes for one in estimates)),
        "measuring": _duration(sum(one.evaluation_minutes for one in estimates)),
        "disk": _size(sum(one.disk_bytes for one in estimates)),
    }
    for name, total in columns.items():
        table.add_column(name, total, justify="left" if name == "arm" else "right")
    for one in estimates:
        table.add_row(
            Text(one.arm),
            f"{one.parameters:,}",
            f"{one.seconds_per_step:.3f}",
            _duration(one.training_minutes),
            _duration(one.evaluation_minutes),
            _size(one.disk_bytes),
        )
    return table


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
    module = TrainingModule(drafter, settings.objective).to(device, dtype)
    reader = TargetReader(inputs.target, drafter, settings.data.row_length, dtype)
    optimizer = build_optimizer(module, settings.optimizer)
    batch = _batch(inputs).to(device)

    def micro_batch() -> None:
        module.zero_grad()  # here, so that there always are gradients to update with
        module(reader.view(batch), batch, reader).total.backward()

    seconds = medians({"micro-batch": micro_batch, "update": optimizer.step}, _REPEATS)
    return accumulation * seconds["micro-batch"] + seconds["update"]


def _of_arm(
    arm: SizedArm, inputs: Prepared, device: torch.device, trainings: int, decoding: float
) -> Estimate:
    step = seconds_per_step(inputs, device)
    return Estimate(
        arm=arm.name,
        parameters=arm.parameters,
        seconds_per_step=step,
        training_minutes=trainings * inputs.settings.steps * step / 60,
        evaluation_minutes=decoding,
        disk_bytes=trainings * _bytes_of_run(arm.parameters, inputs.settings),
    )


def _with_settings(inputs: Prepared, settings: TrainSettings) -> Prepared:
    config = config_for(settings.drafter, inputs.drafter_config.target_record)
    # Which tokens an arm drafts takes no time to speak of.
    return replace(inputs, settings=settings, drafter_config=config, draft_ids=None)


def _batch(inputs: Prepared) -> Batch:
    batch = inputs.settings.batch
    sampler = Sampler(
        inputs.rows,
        rows_per_step=batch.rows,
        rule=anchor_rule(inputs.settings),
        seed=inputs.settings.seed,
    )
    return sampler.batch(0, 0, batch.micro_batch)


def _bytes_of_run(parameters: int, settings: TrainSettings) -> int:
    """Return the bytes of a drafter, and of its checkpoints while another one is written."""
    drafter = parameters * TORCH_DTYPES[settings.engine.dtype].itemsize
    every = settings.checkpoint.every
    written = 0 if every is None else math.ceil(settings.steps / every)
    checkpoints = min(written, settings.checkpoint.keep + 1)
    return drafter + checkpoints * _STATES * _MASTER_BYTES * parameters


def _duration(minutes: float) -> str:
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
