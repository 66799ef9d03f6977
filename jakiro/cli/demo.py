"""The command `jakiro demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli.output import writer
from jakiro.utils.logs import quiet_libraries


@quiet_libraries()
def demo(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the trained drafter; by default in the user's cache."
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")
    ] = "auto",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all figures to this new file."),
    ] = None,
) -> None:
    """Train a drafter for a chat model for a few minutes, and compare methods of decoding.

    The model, SmolLM2-135M-Instruct, is downloaded first (about 100 MB).
    """
    store = writer(json_file, content="the figures")  # refuses a file that exists before any work
    from jakiro.demo import run_demo

    run_demo(cache_dir, device, store=store)
