"""The command `jakiro demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli import options


def demo(
    preset: Annotated[
        Literal["smoke", "small"],
        typer.Option(help="smoke: train for seconds; small: train for minutes."),
    ] = "small",
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the trained models; by default in the user's cache."
        ),
    ] = None,
    device: options.Device = "auto",
    target: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_HUB_ID", help="Model to draft for, instead of a toy model."),
    ] = None,
) -> None:
    """Train a toy target and a drafter for it, and show the speed-up of drafting."""
    from jakiro.demo.pipeline import run_demo

    run_demo(preset=preset, cache_dir=cache_dir, device=device, target=target)
