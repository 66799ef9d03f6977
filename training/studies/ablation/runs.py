"""Trains the arms, each with every seed, in this process or through DeepSpeed's launcher."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.config import JakiroConfig
from jakiro.errors import JakiroError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import dump_settings
from training.config import TrainSettings
from training.loop.run_folder import RunFolder
from training.studies.ablation.arms import SizedArm
from training.studies.ablation.sweep import Sweep, value_name
from training.train import train

Launcher = Literal["inline", "deepspeed"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class ArmRun:
    """One arm with one seed.

    Attributes:
        arm: its name.
        seed: of weights, order of rows, and anchors.
        settings: complete, with the run's own folder.
        value: of the setting that is swept; None without a sweep.
    """

    arm: str
    seed: int
    settings: TrainSettings
    value: float | None = None

    @property
    def name(self) -> str:
        """What tells it apart from the other runs of its seed."""
        return self.arm if self.value is None else f"{self.arm} at {value_name(self.value)}"

    @property
    def folder(self) -> RunFolder:
        """Where it trains."""
        return RunFolder(self.settings.run_folder)

    @property
    def training_tokens(self) -> int:
        """Tokens that it has read."""
        return int(self._record["training"]["tokens"])

    @property
    def held_out_agreement(self) -> float | None:
        """How often drafter and target agree on the next token of held-out text, if it is known."""
        held_out = self._record["evaluation"].get("held_out")
        return None if held_out is None else float(held_out["levels"][0]["agreement"])

    @property
    def experts(self) -> Mapping[str, Any] | None:
        """Diversity of the experts (`training.evaluation.diversity`), if it was measured."""
        return self._record["evaluation"].get("experts")

    @property
    def _record(self) -> dict[str, Any]:
        return JakiroConfig.from_pretrained(self.folder.drafter).record or {}


def runs_of(
    arms: Sequence[SizedArm], num_seeds: int, folder: Path, sweep: Sweep | None = None
) -> list[ArmRun]:
    """Return every arm with every seed, seed by seed, so that whole seeds are finished first.

    Arms with one seed see the same rows in the same order.

    Args:
        arms: equally large.
        num_seeds: from the base's own on.
        folder: of the study.
        sweep: every arm is there with each of its values.
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
    """Train what is not finished; an interrupted run goes on where it stopped.

    Args:
        runs: in this order.
        launcher: "inline" trains in this process, "deepspeed" on all devices of this machine.
        model: the target, for runs in this process.
        tokenizer: its tokenizer.

    Raises:
        JakiroError: a run cannot be trained, or its launcher failed.
    """
    for number, run in enumerate(runs, start=1):
        if run.folder.is_finished:
            continue
        _logger.info(f"run {number} of {len(runs)}: {run.name}, seed {run.seed}")
        if launcher == "inline":
            train(run.settings, model=model, tokenizer=tokenizer)
        else:
            _launch(run)


def forget(runs: Sequence[ArmRun], arm: str) -> None:
    """Delete the runs of one arm, so that it is trained again."""
    for run in runs:
        if run.arm == arm:
            shutil.rmtree(run.folder.path, ignore_errors=True)


def _run(
    sized: SizedArm, seed: int, folder: Path, sweep: Sweep | None, value: float | None
) -> ArmRun:
    place = folder / "runs" / sized.name
    if sweep is not None and value is not None:
        sized, place = sweep.applied(sized, value), place / value_name(value)
    return ArmRun(sized.name, seed, _run_settings(sized, seed, place / f"seed-{seed}"), value)


def _run_settings(sized: SizedArm, seed: int, place: Path) -> TrainSettings:
    settings = sized.arm.settings
    # The study measures decoding itself, all arms in turns.
    evaluation = settings.evaluation.model_copy(update={"num_prompts": 0, "every": None})
    checkpoint = settings.checkpoint.model_copy(update={"keep": 1})
    return settings.model_copy(
        update={
            "seed": seed,
            "evaluation": evaluation,
            "checkpoint": checkpoint,
            "run_folder": place,
        }
    )


def _launch(run: ArmRun) -> None:
    folder = ensure_writable_folder(run.settings.run_folder)
    config = folder / "launch.yaml"
    write_atomically(config, dump_settings(run.settings))
    program = str(Path(sys.executable).with_name("deepspeed"))
    command = [program, "--module", "training.train", "--config", str(config)]
    finished = subprocess.run(command, check=False)
    if not run.folder.is_finished:
        raise JakiroError(
            f"training {run.name} with seed {run.seed} failed",
            expected="a finished run",
            got=f"exit code {finished.returncode}",
            remedy=f"see above, or repeat it alone: {' '.join(command)}",
        )
