"""The command `jakiro serve`."""

import os
from typing import Annotated

import typer

from jakiro.cli import options
from jakiro.cli.generate import load_decoder
from jakiro.cli.options import Context, settings_from
from jakiro.cli.output import say
from jakiro.errors import ConfigError
from jakiro.utils.extras import require_extra
from jakiro.utils.logs import quiet_libraries

_KEY = "JAKIRO_API_KEY"
_SHORTEST_KEY = 8  # number of characters


@quiet_libraries()
def serve(
    context: Context,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="DRAFTER",
            help=f"Folder or hub id of a drafter; or, with --target, {options.DRAFTERS}.",
        ),
    ],
    target: options.TargetOfDrafter = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; others than this machine's own require a key."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free port.")] = 8000,
    model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model; by default the last part of the target's path."),
    ] = None,
    places: Annotated[
        int, typer.Option(help="Largest number of sequences that are decoded together.")
    ] = 8,
    capacity: Annotated[
        int, typer.Option(help="Largest number of tokens of a sequence, including its prompt.")
    ] = 4096,
    queue: Annotated[
        int, typer.Option(help="Largest number of sequences that wait; others get status 429.")
    ] = 64,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Origin of web pages that may send requests; may be repeated.",
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest size of a request in bytes.")
    ] = 4_000_000,
    playground: Annotated[
        bool, typer.Option(help="Serve the playground, a web page at the path /.")
    ] = True,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds that running requests may take after SIGTERM.")
    ] = 30.0,
    tree: options.TreeChoice = "auto",
    threads: options.ThreadCount = "auto",
    packed: options.PackedWeights = "auto",
    compiled: options.Compiled = False,
    other_weights: options.OtherWeights = False,
    batch_invariant: options.BatchInvariant = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Serve a target with OpenAI's interface, sped up by a drafter.

    Each request must contain a key if the environment variable JAKIRO_API_KEY is set; it has
    several keys if they are separated by commas.
    """
    require_extra("serve")
    from inference.serving.server import serve as serve_decoder
    from inference.serving.settings import ServeSettings

    settings = settings_from(context, ServeSettings, api_keys=_api_keys())
    decoder = load_decoder(context)

    def on_ready(url: str) -> None:
        say(f"ready: {url}")
        if settings.playground:
            say(f"playground: {url.removesuffix('v1')}")

    code = serve_decoder(decoder, settings, on_ready)
    raise typer.Exit(code)


def _api_keys() -> tuple[str, ...]:
    """Return the keys in the environment; errors do not show them."""
    keys = tuple(key for key in os.environ.get(_KEY, "").split(",") if key)
    shortest = min(map(len, keys), default=_SHORTEST_KEY)
    if shortest < _SHORTEST_KEY:
        raise ConfigError(
            f"a key in {_KEY} is too short",
            expected=f"at least {_SHORTEST_KEY} characters",
            got=shortest,
            remedy="use a longer random text",
        )
    return keys
