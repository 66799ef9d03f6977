"""The command `jakiro features`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.output import say
from jakiro.cli.training_settings import (
    SettingsFile,
    refuse_missing_inputs,
    training_settings,
)
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from training.config import TrainSettings
    from training.target_states.writer import TargetStateWriter


def features(
    config: SettingsFile,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write; for training, set target_states.folder to this folder.",
        ),
    ],
    overrides: options.Overrides = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read finished shards again, and replace damaged ones."),
    ] = False,
) -> None:
    """Precompute the target's states for the whole dataset, for target_states.source=offline.

    After an interruption, run the same command again to continue. Several processes may write at
    the same time.
    """
    settings = training_settings(config, overrides)
    refuse_missing_inputs(settings)
    _write_states(settings, out, check=check)


@quiet_libraries()
def _write_states(settings: "TrainSettings", out: Path, *, check: bool) -> None:
    from jakiro.utils.pretrained import choose_device
    from training.module import move_target
    from training.setup.preparation import prepare
    from training.target_states.writer import TargetStateWriter

    device = choose_device(settings.engine.device)
    inputs = prepare(settings)
    writer = TargetStateWriter(inputs, out)
    if check and (damaged := writer.folder.drop_damaged()):
        typer.echo(f"damaged: {', '.join(damaged)}")
    typer.echo(str(writer))
    move_target(inputs.target, device, needs_layers=True)
    if _write(writer):
        typer.echo(f"all target states are in {writer.folder.path}")
    else:
        say("other processes are writing the remaining shards")


def _write(writer: "TargetStateWriter") -> bool:
    """Write the shards with a progress bar on standard error."""
    from jakiro.utils.progress import ProgressDisplay

    with ProgressDisplay() as bar:
        task = bar.add_task("Sequences", total=writer.num_sequences_left)
        return writer.write(lambda count: bar.advance(task, count))
