"""What a study would take, from a few steps of every arm; nothing is written.

Minutes and bytes are those of all trainings of an arm. One process is measured: DeepSpeed on
several devices is faster, and other work on the machine makes all of it slower.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from inference.benchmark.method_names import PLAIN
from jakiro.config import config_for
from jakiro.utils.pretrained import choose_device
from jakiro.utils.settings import Settings
from training.config import TrainSettings
from training.planning.estimate import disk_bytes, duration_text, size_text
from training.planning.speed import decoding_rate, seconds_per_step
from training.setup.preparation import Prepared
from training.studies.ablation.arms import SizedArm
from training.studies.ablation.runs import runs_of


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
        "training": duration_text(sum(one.training_minutes for one in estimates)),
        "measuring": duration_text(sum(one.evaluation_minutes for one in estimates)),
        "disk": size_text(sum(one.disk_bytes for one in estimates)),
    }
    for name, total in columns.items():
        table.add_column(name, total, justify="left" if name == "arm" else "right")
    for one in estimates:
        table.add_row(
            Text(one.arm),
            f"{one.parameters:,}",
            f"{one.seconds_per_step:.3f}",
            duration_text(one.training_minutes),
            duration_text(one.evaluation_minutes),
            size_text(one.disk_bytes),
        )
    return table


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
        disk_bytes=trainings * disk_bytes(arm.parameters, inputs.settings),
    )


def _with_settings(inputs: Prepared, settings: TrainSettings) -> Prepared:
    config = config_for(settings.drafter, inputs.drafter_config.target_record)
    # Which tokens an arm drafts takes no time to speak of.
    return replace(inputs, settings=settings, drafter_config=config, draft_ids=None)
