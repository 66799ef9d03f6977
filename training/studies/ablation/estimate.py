"""Estimate of a study's time and disk space, from a few steps of every arm.

Minutes and bytes are totals over all trainings of an arm. A single process is measured, and nothing
is written to disk. A study is faster with DeepSpeed on several devices, and slower if other
programs use the machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from inference.benchmark.method_names import AUTOREGRESSIVE
from jakiro.config import config_for
from jakiro.utils.pretrained import choose_device
from jakiro.utils.settings import Settings
from training.config import TrainSettings
from training.planning.estimate import disk_bytes, duration_text, size_text
from training.planning.speed import decoding_rate, seconds_per_step
from training.setup.preparation import RunInputs
from training.studies.ablation.arms import SizedArm
from training.studies.ablation.runs import runs_of


class ArmEstimate(Settings):
    """Time and disk space of one arm, with all seeds and all values of a sweep.

    Attributes:
        arm: name of the arm, or `autoregressive` for decoding without a drafter.
        parameters: number of trainable parameters.
        seconds_per_step: measured seconds of an optimizer step.
        training_minutes: minutes that the optimizer steps of all trainings take.
        evaluation_minutes: minutes that decoding for the evaluation would take without a drafter.
        disk_bytes: peak number of bytes of drafters and checkpoints, summed over all trainings.
    """

    arm: str
    parameters: int
    seconds_per_step: float
    training_minutes: float
    evaluation_minutes: float
    disk_bytes: int


def estimate(
    sized: Sequence[SizedArm],
    inputs: RunInputs,
    *,
    seeds: int,
    evaluation_tokens: int,
    sweep_runs: int = 0,
    sweep_tokens: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[ArmEstimate]:
    """Return the estimates of all arms and of autoregressive decoding.

    Args:
        sized: arms of equal size.
        inputs: target and data, which all arms share; the target is moved to the training device.
        seeds: number of seeds with which every arm is trained.
        evaluation_tokens: number of tokens that one arm decodes with one seed: prompts x new tokens
            x temperatures x repeats x kinds of trees.
        sweep_runs: number of additional trainings of every arm for a sweep.
        sweep_tokens: number of tokens that one arm decodes for a sweep.
        advance: function that is called after each arm.

    Raises:
        ConfigError: the device is missing, or a batch cannot be divided evenly into micro-batches.
    """
    device = choose_device(inputs.settings.engine.device)
    model: Any = inputs.target.model
    model.to(device)
    rate = decoding_rate(inputs)
    decoding, sweeping = (count / rate / 60 for count in (seeds * evaluation_tokens, sweep_tokens))
    # Runs keep fewer checkpoints than the arms' settings say, so the settings of the runs are used.
    runs = runs_of(sized, 1, inputs.settings.run_folder)
    estimates = []
    for arm, run in zip(sized, runs, strict=True):
        own = _with_settings(inputs, run.settings)
        estimates.append(_of_arm(arm, own, device, seeds + sweep_runs, decoding + sweeping))
        advance()
    without_drafter = ArmEstimate(
        arm=AUTOREGRESSIVE,
        parameters=0,
        seconds_per_step=0.0,
        training_minutes=0.0,
        evaluation_minutes=decoding,
        disk_bytes=0,
    )
    return [*estimates, without_drafter]


def render(estimates: Sequence[ArmEstimate]) -> Table:
    """Return a table of the estimates, with totals."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_footer=True)
    columns = {
        "arm": "all",
        "parameters": "",
        "s / step": "",
        "training": duration_text(sum(arm.training_minutes for arm in estimates)),
        "measuring": duration_text(sum(arm.evaluation_minutes for arm in estimates)),
        "disk": size_text(sum(arm.disk_bytes for arm in estimates)),
    }
    for name, total in columns.items():
        table.add_column(name, total, justify="left" if name == "arm" else "right")
    for arm in estimates:
        table.add_row(
            Text(arm.arm),
            f"{arm.parameters:,}",
            f"{arm.seconds_per_step:.3f}",
            duration_text(arm.training_minutes),
            duration_text(arm.evaluation_minutes),
            size_text(arm.disk_bytes),
        )
    return table


def _of_arm(
    arm: SizedArm, inputs: RunInputs, device: torch.device, trainings: int, decoding: float
) -> ArmEstimate:
    step = seconds_per_step(inputs, device)
    settings = inputs.settings.with_steps(len(inputs.sequences))
    minutes = settings.num_steps * step / 60
    return ArmEstimate(
        arm=arm.name,
        parameters=arm.parameters,
        seconds_per_step=step,
        training_minutes=trainings * min(minutes, settings.minutes or math.inf),
        evaluation_minutes=decoding,
        disk_bytes=trainings * disk_bytes(arm.parameters, settings),
    )


def _with_settings(inputs: RunInputs, settings: TrainSettings) -> RunInputs:
    config = config_for(settings.drafter, inputs.drafter_config.target_record)
    # The time for the selection of the draft vocabulary is negligible.
    return replace(inputs, settings=settings, drafter_config=config, draft_ids=None)
