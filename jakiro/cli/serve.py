"""The command `jakiro serve`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from inference.drafters.names import refuse_missing_parts
from jakiro.cli import options
from jakiro.cli.generate import load_decoder
from jakiro.cli.options import Context, settings_from
from jakiro.cli.output import say
from jakiro.cli.remote_server import KEY_VARIABLE, keys_in_environment
from jakiro.errors import ConfigError
from jakiro.utils.extras import require_extra
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from inference.serving.learning.adaptation import Learner

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
        typer.Option(
            help="Address to listen on. If other machines can reach it, requests require a key."
        ),
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
    keys_file: Annotated[
        Path | None,
        typer.Option(
            callback=options.existing_file,
            help="YAML file with the hashes of keys by the names of their users.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            callback=options.existing_file,
            help="PEM file with the certificate of the server, for connections with TLS.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            callback=options.existing_file, help="PEM file with the key of the certificate."
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Name of the server, which requests must be sent to; may be repeated. By default, "
            "the names of this machine, or all names if other machines can connect.",
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Origin of web pages that may send requests; may be repeated.",
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest size of the body of a request in bytes.")
    ] = 1_048_576,
    request_seconds: Annotated[
        float, typer.Option(help="Seconds after which a request that is not complete is ended.")
    ] = 600.0,
    remote_sessions: Annotated[
        int,
        typer.Option(
            help="Largest number of texts at the same time whose drafts other machines send, see "
            "`jakiro connect`; 0 for none."
        ),
    ] = 0,
    remote_sessions_per_key: Annotated[
        int, typer.Option(help="Largest number of these texts of each key.")
    ] = 4,
    remote_idle_seconds: Annotated[
        float, typer.Option(help="Seconds after which the memory of such a text is freed.")
    ] = 120.0,
    playground: Annotated[
        bool, typer.Option(help="Serve the playground, a web page at the path /.")
    ] = True,
    adapt: Annotated[
        Literal["off", "shared"],
        typer.Option(
            help="Whether a trained drafter learns from the texts of all users while the server is "
            "idle; off keeps no text.",
        ),
    ] = "off",
    adapt_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the versions of the drafter's weights; by default, they are lost when "
            "the server ends."
        ),
    ] = None,
    adapt_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of recent texts, kept in memory.")
    ] = 500_000,
    adapt_hours: Annotated[
        float, typer.Option(help="Number of hours after which a text is forgotten.")
    ] = 24.0,
    adapt_every: Annotated[
        int, typer.Option(help="Number of new texts after which the drafter learns.")
    ] = 64,
    adapt_idle_seconds: Annotated[
        float, typer.Option(help="Seconds without a request after which learning goes on.")
    ] = 5.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds that running requests may take after SIGTERM.")
    ] = 30.0,
    tree: options.TreeChoice = "auto",
    threads: options.ThreadCount = "auto",
    packed: options.PackedWeights = "auto",
    compiled: options.Compiled = False,
    captured: options.Captured = False,
    other_weights: options.OtherWeights = False,
    batch_invariant: options.BatchInvariant = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Serve a target with OpenAI's interface, sped up by a drafter.

    Each request must contain a key if there is a file of keys, or if the environment variable
    JAKIRO_API_KEY is set; it has several keys if they are separated by commas.
    """
    require_extra("serve")
    keys = _api_keys()
    refuse_missing_parts(drafter, target)
    from inference.serving.address import listen
    from inference.serving.settings import ServeSettings

    settings = settings_from(context, ServeSettings, api_keys=keys)
    if settings.adapt != "off":
        _refuse_untrained(drafter)

    def on_ready(url: str) -> None:
        say(f"ready: {url}")
        if settings.playground:
            say(f"playground: {url.removesuffix('v1')}")

    # A port that is in use is refused before the slow imports.
    with listen(settings) as listener:
        from inference.serving.server import serve as serve_decoder

        learner = None if settings.adapt == "off" else _learner(context)
        code = serve_decoder(lambda: load_decoder(context), settings, on_ready, learner, listener)
    raise typer.Exit(code)


def _refuse_untrained(drafter: str) -> None:
    """Raise an error for a drafter that certainly does not learn."""
    from inference.drafters.names import PairName, UntrainedName

    if UntrainedName.parse(drafter) is None and PairName.parse(drafter) is None:
        return
    raise ConfigError(
        "this drafter does not learn with --adapt",
        expected="a trained drafter",
        got=drafter,
        remedy="pass the folder of a trained drafter, or leave out --adapt",
    )


def _learner(context: Context) -> "Learner":
    """Return the program that learns, with the models that it loads."""
    require_extra("train")
    from inference.serving.learning.adaptation import Learner

    chosen = context.params
    return Learner(
        (sys.executable, "-m", "training.online.learner"),
        chosen["drafter"].removeprefix("drafter="),
        chosen["target"],
        chosen["other_weights"],
    )


def _api_keys() -> tuple[str, ...]:
    """Return the keys in the environment; errors do not show them."""
    keys = keys_in_environment()
    if KEY_VARIABLE in os.environ and not keys:
        raise ConfigError(
            f"{KEY_VARIABLE} has no key",
            expected="one or more keys, separated by commas",
            got="a variable that is empty",
            remedy=f"set {KEY_VARIABLE} to a long random text, or unset it",
        )
    shortest = min(map(len, keys), default=_SHORTEST_KEY)
    if shortest < _SHORTEST_KEY:
        raise ConfigError(
            f"a key in {KEY_VARIABLE} is too short",
            expected=f"at least {_SHORTEST_KEY} characters",
            got=shortest,
            remedy="use a longer random text",
        )
    return keys
