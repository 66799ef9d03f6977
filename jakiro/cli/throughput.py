"""The command `jakiro throughput`."""

from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli import options
from jakiro.cli.output import writer
from jakiro.cli.training_settings import (
    SettingsFile,
    refuse_missing_inputs,
    training_settings,
)
from jakiro.utils.logs import quiet_libraries


def throughput(
    config: SettingsFile,
    overrides: options.Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to time.")] = 12,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write all measured values to this file."),
    ] = None,
) -> None:
    """Measure the speed of each part of a training step, and the overhead of a whole step."""
    store, settings = writer(out, "--out"), training_settings(config, overrides)
    refuse_missing_inputs(settings)
    from training.planning.throughput import measure, summary

    with quiet_libraries():
        measured = measure(settings, steps)
    store(measured.model_dump_json(indent=1) + "\n")
    for line in summary(measured):
        typer.echo(line)
