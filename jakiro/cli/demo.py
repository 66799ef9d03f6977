"""The command `jakiro demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli import options
from jakiro.cli.output import writer
from jakiro.utils.logs import quiet_libraries


@quiet_libraries()
def demo(
    preset: Annotated[
        Literal["chat", "small", "smoke"],
        typer.Option(
            help="chat: a chat model that is downloaded (about 100 MB); small: a toy model that is "
            "trained for a few minutes; smoke: a toy model that is trained for a few seconds."
        ),
    ] = "chat",
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the trained models; by default in the user's cache."
        ),
    ] = None,
    device: options.Device = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="Model to draft for, instead of the preset's model; the default preset is then "
            "small.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all figures to this new file."),
    ] = None,
) -> None:
    """Train a drafter for a few minutes, and show how much faster a model generates with it."""
    from jakiro.utils.files import ensure_writable_folder

    # before the model is downloaded
    if cache_dir is not None:
        ensure_writable_folder(cache_dir)
    store = writer(json_file, content="the figures")
    if preset == "chat" and target is None:
        from jakiro.demo.chat_model import is_available, run_chat_demo

        if is_available():
            run_chat_demo(cache_dir, device, store=store)
            return
        typer.echo("The demo continues with a toy model.", err=True)
    from jakiro.demo.pipeline import run_demo

    toy = "small" if preset == "chat" else preset
    run_demo(preset=toy, cache_dir=cache_dir, device=device, target=target, store=store)
