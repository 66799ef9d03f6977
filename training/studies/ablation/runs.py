"""Training runs of a study: every arm with every seed, in this process or with DeepSpeed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.config import JakiroConfig
from jakiro.errors import EXIT_CODE_INTERRUPTED, JakiroError
from jakiro.utils.files import checksum, ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings, dump_settings, validate_settings
from training.config import TrainSettings
from training.distributed.launch import LaunchOptions, command, launch
from training.loop.run_fingerprint import run_fingerprint
from training.loop.run_folder import RunFolder
from training.studies.ablation.arms import SizedArm
from training.studies.ablation.sweep import Sweep, value_name
from training.train import train

Launcher = Literal["inline", "deepspeed"]

_logger = get_logger(__name__)


class MeasuredRun(Settings):
    """Facts about a measured run that a study stores, to continue without the run's drafter.

    Attributes:
        weights: SHA-256 of the file of the drafter's weights.
        facts: fingerprints of the target, of the data and, if there is one, of the start drafter.
        record: record of the training in the drafter's configuration, with all settings.
    """

    weights: str
    facts: dict[str, str]
    record: dict[str, JsonValue]

    def fingerprint(self, source: str) -> dict[str, Any]:
        """Return the fingerprint of the run; settings that are newer than the run have defaults.

        Args:
            source: name of the file, for error messages.

        Raises:
            ConfigError: this version does not know one of the settings.
        """
        values: Any = self.record["settings"]
        return run_fingerprint(validate_settings(TrainSettings, values, source=source), self.facts)


@dataclass(frozen=True)
class ArmRun:
    """A training run of one arm with one seed.

    Attributes:
        arm: name of the arm.
        seed: seed of the initial weights, the order of the sequences, and the anchors.
        settings: complete settings of the run, including its run folder.
        value: value of the setting that is swept; None if there is no sweep.
        measured: facts about the run from its stored measurement; None if the drafter is in the
            run folder, or has to be trained.
    """

    arm: str
    seed: int
    settings: TrainSettings
    value: float | None = None
    measured: MeasuredRun | None = None

    @property
    def name(self) -> str:
        """The name of the run, which is unique among the runs with the same seed."""
        return self.arm if self.value is None else f"{self.arm} at {value_name(self.value)}"

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.settings.run_folder)

    @property
    def is_finished(self) -> bool:
        """Whether the run needs no more training."""
        return self.measured is not None or self.folder.is_finished

    @property
    def weights(self) -> str:
        """The SHA-256 of the file of the drafter's weights."""
        if self.measured is not None:
            return self.measured.weights
        return checksum(self.folder.drafter / "model.safetensors")

    @property
    def training_tokens(self) -> int:
        """The number of tokens that were read in training."""
        return int(self.record["training"]["tokens"])

    @property
    def validation_agreement(self) -> float | None:
        """The agreement with the target on validation tokens; None if it was not measured."""
        validation = self.record["evaluation"].get("validation")
        return None if validation is None else float(validation["levels"][0]["agreement"])

    @property
    def experts(self) -> Mapping[str, Any] | None:
        """The diversity of the experts (`training.evaluation.diversity`); None if not measured."""
        return self.record["evaluation"].get("experts")

    @property
    def record(self) -> dict[str, Any]:
        """The record of the training: its settings, provenance, progress and evaluation."""
        if self.measured is not None:
            return dict(self.measured.record)
        return JakiroConfig.from_pretrained(self.folder.drafter).record or {}


def runs_of(
    arms: Sequence[SizedArm], num_seeds: int, folder: Path, sweep: Sweep | None = None
) -> list[ArmRun]:
    """Return the runs of every arm with every seed, seed by seed.

    Arms with the same seed read the same sequences in the same order.

    Args:
        arms: arms of equal size.
        num_seeds: number of consecutive seeds, starting with the seed of the base.
        folder: folder of the study.
        sweep: setting, with the values to train every arm with; None for no sweep.
    """
    first = arms[0].arm.settings.seed
    values: Sequence[float | None] = (None,) if sweep is None else sweep.values
    return [
        _run(sized, seed, folder, sweep, value)
        for seed in range(first, first + num_seeds)
        for sized in arms
        for value in values
    ]


def train_runs(
    runs: Sequence[ArmRun],
    launcher: Launcher,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Train the unfinished runs; an interrupted run is resumed from its last checkpoint.

    Args:
        runs: runs in the order of training.
        launcher: "inline" to train in this process, "deepspeed" to train on all devices of this
            machine.
        model: the target, for runs in this process.
        tokenizer: the target's tokenizer, for runs in this process.

    Raises:
        JakiroError: a run cannot be trained, or its launcher failed.
    """
    for number, run in enumerate(runs, start=1):
        if run.is_finished:
            continue
        _logger.info(f"run {number} of {len(runs)}: {run.name}, seed {run.seed}")
        if launcher == "inline":
            train(run.settings, model=model, tokenizer=tokenizer)
        else:
            _launch(run)


def forget(runs: Sequence[ArmRun], arm: str, folder: Path) -> None:
    """Delete the run folders of one arm, so that the arm is trained again.

    What was stored to continue without its drafters is deleted as well, in all cells.

    Args:
        runs: all runs of the study.
        arm: name of the arm.
        folder: folder of the study.

    Raises:
        ConfigError: another process is training one of the runs.
    """
    for run in runs:
        if run.arm == arm:
            for inputs in folder.glob(f"**/measurements/{arm}-{run.seed}.inputs.json"):
                inputs.unlink()
            run.folder.clear()


def _run(
    sized: SizedArm, seed: int, folder: Path, sweep: Sweep | None, value: float | None
) -> ArmRun:
    home = folder / "runs" / sized.name
    if sweep is not None and value is not None:
        sized, home = sweep.applied(sized, value), home / value_name(value)
    return ArmRun(sized.name, seed, _run_settings(sized, seed, home / f"seed-{seed}"), value)


def _run_settings(sized: SizedArm, seed: int, run_folder: Path) -> TrainSettings:
    settings = sized.arm.settings
    # Runs do not measure decoding, because the study measures it with interleaved timings.
    evaluation = settings.evaluation.model_copy(update={"num_prompts": 0, "every": None})
    # Runs are evaluated only at the end, so `best` would be a copy of the finished drafter.
    checkpoint = settings.checkpoint.model_copy(update={"keep": 1, "keep_best": False})
    return settings.model_copy(
        update={
            "seed": seed,
            "evaluation": evaluation,
            "checkpoint": checkpoint,
            "run_folder": run_folder,
        }
    )


def _launch(run: ArmRun) -> None:
    folder = ensure_writable_folder(run.settings.run_folder)
    config = folder / "launch.yaml"
    write_atomically(config, dump_settings(run.settings))
    code = launch(command(run.settings, config, (), LaunchOptions()), run.settings)
    if code == EXIT_CODE_INTERRUPTED:
        raise KeyboardInterrupt
    if not run.folder.is_finished:
        raise JakiroError(
            f"training {run.name} with seed {run.seed} failed",
            expected="a finished run",
            got=f"exit code {code}",
            remedy="see the messages above; the same command continues the study",
        )
