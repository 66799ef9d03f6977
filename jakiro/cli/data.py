"""`jakiro data`."""

from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(
    name="data",
    help="Make texts, prompts and a small model from Python's standard library.",
    no_args_is_help=True,
)

_Tokenizer = Annotated[str, typer.Option(metavar="PATH_OR_HUB_ID", help="The target's tokenizer.")]


@data.command()
def texts(
    target: Annotated[str, typer.Option(metavar="PATH_OR_HUB_ID", help="A causal language model.")],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="File to write.")],
    files: Annotated[int, typer.Option(min=1, help="Source files to take.")] = 200,
    batches: Annotated[
        int, typer.Option(min=0, help="Batches of 64 continuations by the target.")
    ] = 8,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompt file to be measured on; the source files of its prompts are left out; "
            "may be repeated.",
        ),
    ] = None,
) -> None:
    """Write training texts: library source, and the target's own continuations of it."""
    from jakiro.demo.write import write_texts

    write_texts(target, out, files=files, batches=batches, leave_out=leave_out or ())


@data.command()
def prompts(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Source files, relative to --library.")
    ],
    tokenizer: _Tokenizer,
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="File to write.")],
    per_file: Annotated[int, typer.Option(min=1, help="Most prompts of one file.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 96,
    library: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="By default Python's standard library."),
    ] = None,
) -> None:
    """Write prompts to measure on: the heads of functions and classes of source files."""
    from jakiro.demo.corpus import STANDARD_LIBRARY
    from jakiro.demo.write import write_prompts

    write_prompts(
        files,
        tokenizer,
        out,
        per_file=per_file,
        max_tokens=max_tokens,
        library=library or STANDARD_LIBRARY,
    )


@data.command("small-lm")
def small_lm(
    tokenizer: _Tokenizer,
    texts: Annotated[Path, typer.Option(metavar="FILE.jsonl", help='JSONL file of {"text"}.')],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write.")],
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps of 2,048 tokens each.")] = 600,
) -> None:
    """Train a small language model that can draft for a target with the same tokenizer."""
    from jakiro.demo.write import write_small_lm

    write_small_lm(tokenizer, texts, out, layers=layers, hidden=hidden, steps=steps)
