"""`jakiro demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def demo(
    preset: Annotated[
        Literal["smoke", "small"], typer.Option(help="How much to train: seconds or minutes.")
    ] = "small",
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where trained models are kept; by default the user's."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID", help="A causal LM to draft for, instead of a small one."
        ),
    ] = None,
) -> None:
    """Train a drafter for a target, generate with both, and show what drafting gains."""
    from jakiro.demo.pipeline import run_demo

    run_demo(preset=preset, cache_dir=cache_dir, device=device, target=target)
