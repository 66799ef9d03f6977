"""Options of commands that send requests to a running server, and the keys of servers."""

import os
from typing import Annotated

import typer

KEY_VARIABLE = "JAKIRO_API_KEY"
PANEL = "A running server"

ServerUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Address of a running server with OpenAI's interface, such as "
        "http://127.0.0.1:8000/v1. Its key is read from the environment variable JAKIRO_API_KEY.",
        rich_help_panel=PANEL,
    ),
]
ServerModel = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name of the model of the server; by default the only one that it has.",
        rich_help_panel=PANEL,
    ),
]
AsChat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Send each text as the message of a user, instead of as a text to continue.",
        rich_help_panel=PANEL,
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Number of clients, each of which sends one request at a time.",
        rich_help_panel=PANEL,
    ),
]


def server_key() -> str | None:
    """Return the key in the environment, the first one of several; None if there is none."""
    return next(iter(keys_in_environment()), None)


def keys_in_environment() -> tuple[str, ...]:
    """Return the keys in the environment, which are separated by commas."""
    keys = os.environ.get(KEY_VARIABLE, "").split(",")
    return tuple(key.strip() for key in keys if key.strip())
