"""The command `jakiro plot`."""

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.")],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.png", help="Picture to write; an existing file is replaced."),
    ],
) -> None:
    """Draw the curves of training runs: loss, agreement with the target, tau, acceptance rates."""
    from training.evaluation.metrics import metrics_of_run

    for folder in runs:
        metrics_of_run(folder)  # refuses folders without metrics before the slow imports
    from training.evaluation.curves import plot_runs

    plot_runs(runs, out)
    typer.echo(f"wrote {out}")
