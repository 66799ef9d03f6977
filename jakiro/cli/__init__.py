"""The command line: it parses, hands over, and turns a caller's mistake into one clear line.

Commands import their work inside their bodies: `jakiro --help` must not wait for torch.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from jakiro import __version__
from jakiro.cli.aded import aded
from jakiro.cli.bench import bench
from jakiro.cli.demo import demo
from jakiro.cli.features import features
from jakiro.cli.generate import generate
from jakiro.cli.output import EXIT_CODE_INTERRUPTED, say
from jakiro.cli.plot import plot
from jakiro.cli.prepare import prepare
from jakiro.cli.regenerate import regenerate
from jakiro.cli.train import train
from jakiro.cli.verify import verify
from jakiro.errors import JakiroError

EXIT_CODE_BAD_INPUT = 2

_DEBUG = "--debug"

# Threads that wait shall yield soon: GNU OpenMP's spin so long that, beside another busy process,
# each of our many small operations waits for a time slice. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

app = typer.Typer(name="jakiro", add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 when done, 1 if it says no, 2 on bad input, 130 if interrupted.

    Args:
        arguments: the words after the program's name; by default those of this process.

    Raises:
        SystemExit: always, unless the program itself is at fault.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Taken out here, so that it may stand before or after the command's name.
        words_of_command = [word for word in words if word != _DEBUG]
        code = app(words_of_command, prog_name="jakiro", standalone_mode=False)
    except (JakiroError, typer.TyperException) as error:
        if _DEBUG in words:
            traceback.print_exception(error)
        say(f"error: {_explain(error)}")
        code = EXIT_CODE_BAD_INPUT
    if code == EXIT_CODE_INTERRUPTED:
        say("interrupted")
    sys.exit(code)


def _explain(error: JakiroError | typer.TyperException) -> str:
    if isinstance(error, JakiroError):
        return str(error)
    return f"{error.format_message().rstrip('.')}; remedy: see `jakiro --help`"


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(f"jakiro {__version__}")
        raise typer.Exit
    return is_asked


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show tracebacks of errors.")] = False,
) -> None:
    """Exact speculative decoding: draft with a small model, keep the target's own distribution."""


for _command in (demo, prepare, regenerate, train, features, plot, generate, verify, bench):
    app.command()(_command)
app.add_typer(aded, name="aded")
