"""Training runs of a study: every arm with every seed, in this process or with DeepSpeed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.config import JakiroConfig
from jakiro.errors import EXIT_CODE_INTERRUPTED, JakiroError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import dump_settings
from training.config import TrainSettings
from training.distributed.launch import LaunchOptions, command, launch
from training.loop.run_folder import RunFolder
from training.studies.ablation.arms import Arm
from training.studies.ablation.settings import Launcher
from training.train import train

_logger = get_logger(__name__)


@dataclass(frozen=True)
class ArmRun:
    """A training run of one arm with one seed.

    Attributes:
        seed: seed of the initial weights, the order of the sequences, and the anchors.
    """

    arm: str
    seed: int
    settings: TrainSettings

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.settings.run_folder)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record of a finished training: settings, provenance, progress and evaluation."""
        return JakiroConfig.from_pretrained(self.folder.drafter).record or {}


def runs_of(arms: Sequence[Arm], num_seeds: int, folder: Path) -> list[ArmRun]:
    """Return the runs of every arm with every seed, seed by seed.

    Arms with the same seed read the same sequences in the same order.
    """
    first = arms[0].settings.seed
    return [
        _run(arm, seed, folder / "runs" / arm.name / f"seed-{seed}")
        for seed in range(first, first + num_seeds)
        for arm in arms
    ]


def _run(arm: Arm, seed: int, run_folder: Path) -> ArmRun:
    settings = arm.settings
    # Runs do not measure decoding, because the study measures it with interleaved timings.
    evaluation = settings.evaluation.model_copy(update={"num_prompts": 0, "every": None})
    # Runs are evaluated only at the end, so `best` would be a copy of the finished drafter.
    checkpoint = settings.checkpoint.model_copy(update={"keep": 1, "keep_best": False})
    changes: dict[str, Any] = {"evaluation": evaluation, "checkpoint": checkpoint}
    changes |= {"seed": seed, "run_folder": run_folder}
    return ArmRun(arm.name, seed, settings.model_copy(update=changes))


def train_runs(
    runs: Sequence[ArmRun],
    launcher: Launcher,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Train the unfinished runs; an interrupted run is resumed from its last checkpoint."""
    for number, run in enumerate(runs, start=1):
        if run.folder.is_finished:
            continue
        _logger.info(f"run {number} of {len(runs)}: {run.arm}, seed {run.seed}")
        if launcher == "inline":
            train(run.settings, model=model, tokenizer=tokenizer)
        else:
            _launch(run)


def _launch(run: ArmRun) -> None:
    config = ensure_writable_folder(run.settings.run_folder) / "launch.yaml"
    write_atomically(config, dump_settings(run.settings))
    code = launch(command(run.settings, config, (), LaunchOptions()), run.settings)
    if code == EXIT_CODE_INTERRUPTED:
        raise KeyboardInterrupt
    if not run.folder.is_finished:
        raise JakiroError(
            f"training {run.arm} with seed {run.seed} failed with exit code {code}; see the "
            "messages above; the same command continues the study"
        )
