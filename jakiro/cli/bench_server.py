"""`jakiro bench --url`: options of load tests of a running server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli.options import Context, refuse_others, settings_from
from jakiro.cli.output import STANDARD_OUTPUT, writer
from jakiro.cli.remote_server import PANEL, server_key
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from inference.benchmark.server.document import LoadDocument

# Names of the options that apply only to servers.
OF_SERVERS = (
    "model",
    "chat",
    "concurrency",
    "requests",
    "seconds",
    "check",
    "unstreamed_share",
    "cut_share",
    "bad_share",
    "device_drafter",
    "lost_share",
    "timeout",
)
LoadRequests = Annotated[
    int | None,
    typer.Option(
        help="Number of requests; by default each prompt is sent once at each temperature.",
        rich_help_panel=PANEL,
    ),
]
LoadSeconds = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which no new request is sent, instead of --requests.",
        rich_help_panel=PANEL,
    ),
]
CheckedAlone = Annotated[
    bool,
    typer.Option(
        "--check",
        help="First send each request alone, and compare all answers with these.",
        rich_help_panel=PANEL,
    ),
]
UnstreamedShare = Annotated[
    float,
    typer.Option(help="Share of requests whose answer arrives as a whole.", rich_help_panel=PANEL),
]
CutShare = Annotated[
    float,
    typer.Option(
        help="Share of requests whose stream is closed before its end.", rich_help_panel=PANEL
    ),
]
BadShare = Annotated[
    float,
    typer.Option(help="Share of requests that the server must refuse.", rich_help_panel=PANEL),
]
DeviceDrafterName = Annotated[
    str | None,
    typer.Option(
        metavar="DRAFTER",
        help="Each client drafts by itself with this drafter, such as lookup, and the server "
        "verifies, as for `jakiro connect`.",
        rich_help_panel=PANEL,
    ),
]
LostShare = Annotated[
    float,
    typer.Option(
        help="Share of the server's replies to clients that draft which are lost on the way.",
        rich_help_panel=PANEL,
    ),
]
RequestTimeout = Annotated[
    float,
    typer.Option(help="Seconds after which a request counts as failed.", rich_help_panel=PANEL),
]


def bench_server(context: Context, prompts: Path | None, json_file: Path | None) -> None:
    """Measure a server as the options of the running command describe, and show the figures.

    Args:
        context: context of `jakiro bench`.
        prompts: path of the file with the prompts.
        json_file: path of the file for the measured values; None for none.

    Raises:
        ConfigError: no file of prompts was given, or an option has no effect.
        Exit: a request failed; an answer differs from that to the same request sent alone; or the
            measurement was interrupted.
    """
    from inference.benchmark.server.document import LoadSettings
    from inference.benchmark.server.run import measure_load
    from jakiro.utils.progress import ProgressDisplay, tracked

    refuse_others(context, {*LoadSettings.model_fields, "json_file"}, "--url measures a server")
    if prompts is None:
        raise ConfigError(
            "there are no prompts to send",
            expected="--url and --prompts",
            got="--url",
            remedy="name a file with prompts",
        )
    settings = settings_from(context, LoadSettings, prompts=str(prompts))
    store = writer(json_file, standard_output=True)
    with ProgressDisplay() as progress:
        document = asyncio.run(measure_load(settings, server_key(), tracked(progress)))
    _finish(document, store, to_stderr=json_file == STANDARD_OUTPUT)


def _finish(document: "LoadDocument", store: Callable[[str], None], *, to_stderr: bool) -> None:
    from rich.console import Console

    from inference.benchmark.server.figures import load_table

    console = Console(stderr=to_stderr)
    try:  # the table first, because a full disk can prevent the file
        for part in load_table(document):
            console.print(part, highlight=False, markup=False)
    finally:
        store(document.model_dump_json(indent=1) + "\n")
    if not document.is_complete:
        raise typer.Exit(EXIT_CODE_INTERRUPTED)
    if not document.passed:
        raise typer.Exit(1)
