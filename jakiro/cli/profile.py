"""The command `jakiro profile`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli.output import writer
from jakiro.utils.logs import quiet_libraries


@quiet_libraries()
def profile(
    what: Annotated[Literal["gpu"], typer.Argument(help="What to measure.")],
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Device to measure on.")] = "cuda",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="File to create for the measured values."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only check that everything works, with a tiny target.")
    ] = False,
) -> None:
    """Measure decoding on a GPU against transformers, with a random target of 8B parameters."""
    from rich.console import Console

    from inference.profiling.gpu import FULL, QUICK, profile_gpu
    from jakiro.utils.pretrained import choose_device

    store = writer(json_file)
    document, table = profile_gpu(QUICK if quick else FULL, choose_device(device))
    Console().print(table)
    store(document)
