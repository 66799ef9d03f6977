"""The commands of `jakiro data`."""

from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli import options
from jakiro.utils.logs import quiet_libraries

data = typer.Typer(
    name="data",
    help="Make texts and prompts from Python's standard library, and a small model from texts; "
    "compress data.",
    no_args_is_help=True,
)

_Tokenizer = Annotated[
    str,
    typer.Option(
        metavar="PATH_OR_HUB_ID",
        callback=options.existing_tokenizer,
        help="The target's tokenizer.",
    ),
]


@data.command()
@quiet_libraries()
def texts(
    target: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID", callback=options.existing_model, help="Causal language model."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="File to write.")],
    files: Annotated[int, typer.Option(min=1, help="Number of source files.")] = 200,
    batches: Annotated[
        int, typer.Option(min=1, help="Number of batches of 64 continuations by the target.")
    ] = 8,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompt file of a later measurement; the source files of its prompts are left "
            "out; may be repeated.",
        ),
    ] = None,
) -> None:
    """Write training texts: files of Python's library, and texts that the target generates."""
    from jakiro.demo.write import write_texts

    write_texts(target, out, files=files, batches=batches, leave_out=leave_out or ())


@data.command()
def prompts(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Source files, relative to --library.")
    ],
    tokenizer: _Tokenizer,
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="File to write.")],
    per_file: Annotated[int, typer.Option(min=1, help="Largest number of prompts per file.")] = 6,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens of a prompt.")
    ] = 96,
    library: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of source files; by default Python's standard library."
        ),
    ] = None,
) -> None:
    """Write prompts for measurements: source code up to the header of a function or class."""
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
    texts: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl", help='JSONL file with an object {"text": ...} per line.'
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New or empty folder to write.")],
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps, each of 2,048 tokens.")] = 600,
) -> None:
    """Train a small language model that can draft for a target with the same tokenizer."""
    from jakiro.demo.write import write_small_lm

    write_small_lm(tokenizer, texts, out, layers=layers, hidden=hidden, steps=steps)


@data.command()
def shards(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="File of training records.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New or empty folder to write.")],
    records_per_shard: Annotated[
        int, typer.Option(min=1, help="Number of records in each Parquet file.")
    ] = 5000,
    leave_out_persons: Annotated[
        bool,
        typer.Option(
            "--leave-out-persons",
            help="Leave out records that seem to name people, because models tend to invent facts "
            "about people.",
        ),
    ] = False,
) -> None:
    """Compress training records into Parquet files, which training reads like the original."""
    from training.data.shards import write_shards

    num_read, num_written = write_shards(
        source, out, records_per_shard=records_per_shard, leave_out_persons=leave_out_persons
    )
    typer.echo(f"{num_written:,} of {num_read:,} records in {out}")
