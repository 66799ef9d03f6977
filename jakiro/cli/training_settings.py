"""Settings of a training run or a learning curve, and checks of them that do not import torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli.options import existing_file, readable_settings
from jakiro.errors import ConfigError

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


def parse_fractions(text: str) -> list[float]:
    """Return the fractions in a comma-separated list, in ascending order and without repetitions.

    Raises:
        ConfigError: the text is not a list of two or more different numbers above 0 and up to 1.
    """
    try:
        fractions = sorted({float(part) for part in text.split(",")})
    except ValueError:
        fractions = []
    if len(fractions) < 2 or not 0 < fractions[0] <= fractions[-1] <= 1:
        raise ConfigError(
            "--learning-curve needs fractions of the documents",
            expected="two or more different numbers above 0 and up to 1, such as 0.25,0.5,1",
            got=text,
            remedy="write several fractions, separated by commas",
        )
    return fractions
