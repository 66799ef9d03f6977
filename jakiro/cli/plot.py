"""`jakiro plot`."""

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.")],
    out: Annotated[
        Path, typer.Option(metavar="FILE.png", help="Store the picture here; it is replaced.")
    ],
) -> None:
    """Draw runs as curves: loss, agreement with the target, tau, and acceptance by depth."""
    from training.evaluation.curves import plot_runs

    plot_runs(runs, out)
    typer.echo(f"wrote {out}")
