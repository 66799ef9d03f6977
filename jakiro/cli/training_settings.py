"""Settings of a training run, and checks of them that do not import torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli.options import existing_file, readable_settings

SettingsFile = Annotated[
    Path,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=readable_settings,
        help="YAML file with the settings of a training run, or the name of a packaged one.",
    ),
]

if TYPE_CHECKING:
    from training.config import TrainSettings


def training_settings(config: Path, overrides: Sequence[str] | None) -> "TrainSettings":
    """Return the settings in a file, with the overrides of the command line.

    Args:
        config: path of the file, or name of a packaged configuration.
        overrides: values of `--set`.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    from jakiro.utils.settings import load_settings
    from training.config import TrainSettings

    return load_settings(TrainSettings, config, overrides or ())


def refuse_missing_inputs(settings: "TrainSettings") -> None:
    """Raise an error if a model or a file that a run reads is certainly not on this machine.

    Args:
        settings: settings of the run.

    Raises:
        CheckpointError: there is no such target, or no such drafter to start with.
        ConfigError: there is no file of prompts.
        DataError: there is no such file or folder of training data.
    """
    from jakiro.utils.model_names import refuse_missing_drafter, refuse_missing_model
    from training.data.sources import find_sources

    refuse_missing_model(settings.target.name_or_path, remedy="check target.name_or_path")
    find_sources(settings.data.paths)
    existing_file(settings.evaluation.prompts)
    if settings.initialize.drafter is not None:
        refuse_missing_drafter(settings.initialize.drafter)
