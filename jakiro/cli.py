"""The command line: it parses, hands over, and turns a caller's mistake into one clear line.

Commands import their work inside their bodies: `jakiro --help` must not wait for torch.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro import __version__
from jakiro.errors import JakiroError

EXIT_CODE_BAD_INPUT = 2
EXIT_CODE_INTERRUPTED = 130  # typer turns an interruption into this code

_DEBUG = "--debug"

# Threads that wait shall yield soon: GNU OpenMP's spin so long that, beside another busy process,
# each of our many small operations waits for a time slice. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

app = typer.Typer(name="jakiro", add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 when done, 2 on bad input, 130 when interrupted.

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
        _say(f"error: {_explain(error)}")
        code = EXIT_CODE_BAD_INPUT
    if code == EXIT_CODE_INTERRUPTED:
        _say("interrupted")
    sys.exit(code)


def _explain(error: JakiroError | typer.TyperException) -> str:
    if isinstance(error, JakiroError):
        return str(error)
    return f"{error.format_message().rstrip('.')}; remedy: see `jakiro --help`"


def _say(message: str) -> None:
    typer.echo(" ".join(message.split()), err=True)  # one line, whatever a parser quoted


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


@app.command()
def demo(
    preset: Annotated[
        Literal["smoke", "small"], typer.Option(help="How much to train: seconds or minutes.")
    ] = "small",
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where trained models are kept; by default the user's."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID", help="A causal LM to draft for, instead of a small one."
        ),
    ] = None,
) -> None:
    """Train a drafter for a target, generate with both, and show what drafting gains."""
    from jakiro.demo.pipeline import run_demo

    run_demo(preset=preset, cache_dir=cache_dir, device=device, target=target)


@app.command()
def generate(
    drafter: Annotated[str, typer.Argument(help="Folder or hub id of a drafter.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Annotated[
        str | None, typer.Option(help="Where the target is, if not where the drafter says.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the continuation.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue a text as the target would, with the help of its drafter."""
    from inference.decoder import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained(drafter, target)
    pieces = decoder.stream(
        prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()
