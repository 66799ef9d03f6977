"""`jakiro features`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli.output import say

if TYPE_CHECKING:
    from training.target_states.writer import TargetStateWriter


def features(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="The YAML file of settings to train with.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where to write; later target_states.folder.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Lay a value over the file's; may be repeated."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read finished shards again, and write damaged ones anew."),
    ] = False,
) -> None:
    """Write what the target says of all training rows, for target_states.source offline.

    An interrupted start is finished by the next one; several may run side by side.
    """
    from jakiro.utils.settings import load_settings
    from training.config import TrainSettings
    from training.distributed.processes import choose_device
    from training.module import move_target
    from training.setup.preparation import prepare
    from training.target_states.writer import TargetStateWriter

    settings = load_settings(TrainSettings, config, overrides or ())
    device = choose_device(settings.engine.device)
    inputs = prepare(settings)
    writer = TargetStateWriter(inputs, out)
    if check and (damaged := writer.folder.drop_damaged()):
        typer.echo(f"damaged: {', '.join(damaged)}")
    typer.echo(str(writer.plan))
    move_target(inputs.target, device, needs_layers=True)
    if _write(writer):
        typer.echo(f"all features are in {writer.folder.path}")
    else:
        say("the remaining shards are being written by other processes")


def _write(writer: "TargetStateWriter") -> bool:
    """Write with a bar on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Rows", total=writer.plan.num_sequences_left)
        return writer.write(lambda rows: bar.advance(task, rows))
