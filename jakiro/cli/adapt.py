"""The commands of `jakiro adapt`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli.output import say
from jakiro.errors import ConfigError

adapt = typer.Typer(
    name="adapt",
    help="Show or remove what a drafter has learned with `jakiro serve --adapt`.",
    no_args_is_help=True,
)

_IDENTITY = re.compile("[0-9a-f]{32}")  # name of the folder of a drafter

Folder = Annotated[
    Path, typer.Argument(help="Folder that was passed to `jakiro serve --adapt-folder`.")
]


@adapt.callback()
def _group() -> None:
    """Show or remove what a drafter has learned with `jakiro serve --adapt`."""


@adapt.command()
def show(folder: Folder) -> None:
    """Show the versions of a drafter: tau before and after, and the users who taught them."""
    from inference.adaptation.versions import VersionFolder
    from jakiro.errors import CheckpointError

    folders = [VersionFolder(path, path.name) for path in _drafters(folder)]
    if not any(versions.numbers for versions in folders):
        say(f"there are no versions in {folder} yet")
    for versions in folders:
        for number in versions.numbers:
            try:
                record = versions.record(number)
            except CheckpointError as error:
                say(str(error))
                continue
            typer.echo(
                f"{versions.identity[:12]} version {number}, after {record.parent}: "
                f"tau {record.before:.2f} to {record.after:.2f}; "
                f"learned from {', '.join(record.tenants)}"
            )


@adapt.command()
def purge(
    folder: Folder,
    user: Annotated[
        str, typer.Option(help="Name of the user in the file of keys; `everyone` without keys.")
    ],
) -> None:
    """Remove all versions that have learned from a user, while no server uses the folder.

    A running server does this for a user who sends `DELETE /v1/adaptation`.
    """
    from inference.adaptation.versions import VersionFolder, lock_of

    drafters = _drafters(folder)
    with lock_of(folder):
        for path in drafters:
            removed = VersionFolder(path, path.name).purge(user)
            say(f"{path.name[:12]}: removed {len(removed)} versions")


def _drafters(folder: Path) -> list[Path]:
    """Return the folders of all drafters in the folder of a server."""
    if not folder.is_dir():
        raise ConfigError(
            f"there are no versions in {folder}",
            expected="the folder of a server",
            got="no folder",
            remedy="name the folder that was passed to `jakiro serve --adapt-folder`",
        )
    return sorted(path for path in folder.iterdir() if _IDENTITY.fullmatch(path.name))
