"""The command `jakiro init`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli.output import say
from jakiro.utils.files import ensure_new_file

_FILES = (".json", ".jsonl", ".parquet")  # suffixes of training data in files


def init(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_HUB_ID",
            help="The target; only its config is read.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Training data: a JSON, JSONL or Parquet file, a folder of such files, or a "
            "dataset of the hub; may be repeated. By default, the file that the printed command "
            "`jakiro synthesize` writes.",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="An architecture: jakiro for all parts of this package, jakiro-published as in "
            "the paper, moa, eagle3 or a relative (see the page Drafter); by default, a single "
            "layer that starts as the target's last layer.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", help="Settings file to write.")] = Path(
        "my.yaml"
    ),
) -> None:
    """Write the settings of a first training run for a target, and show the next commands."""
    ensure_new_file(out, "the settings")
    from training.planning.starter import short_name, starter_yaml

    paths = data or [f"{short_name(target)}-chats.jsonl"]
    out.write_text(starter_yaml(target, paths, drafter), encoding="utf-8")
    for path in paths if data else ():
        if Path(path).suffix in _FILES and not Path(path).exists():
            say(f"warning: there is no file {path} yet; with it, init knows how much to hold out")
    typer.echo(f"wrote {out}; next:")
    write_data = ["synthesize", "--target", target, "--conversations", "1000", "--out", paths[0]]
    train = ["train", "--config", str(out)]
    name = short_name(target) if drafter is None else f"{short_name(target)}-{drafter}"
    verify = ["verify", "--drafter", f"runs/{name}/drafter"]
    for words in (*([] if data else [write_data]), [*train, "--dry-run"], train, verify):
        typer.echo(f"  {shlex.join(['jakiro', *words])}")
