"""`jakiro prepare`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

DATA = "A file, a folder, or a data set of the hub as NAME or NAME:SPLIT; may be repeated."
TARGET = "The model to draft for."
SKIP = "Leave out rows that cannot be used, and count them; else the first one is an error."


def prepare(
    target: Annotated[str, typer.Option(metavar="PATH_OR_HUB_ID", help=TARGET)],
    data: Annotated[list[str], typer.Option(metavar="PATH", help=DATA)],
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a packed row.")] = 512,
    split: Annotated[
        Literal["never", "texts", "all"],
        typer.Option(help="Which documents to split, so that rows are full; as data.split."),
    ] = "texts",
    preview: Annotated[
        int, typer.Option(min=0, help="Show so many documents, responses in colour.")
    ] = 0,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help=SKIP)] = False,
    cache_folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where tokens are kept; by default the user's cache."),
    ] = None,
) -> None:
    """Read data into the cache that training uses; say what it holds, and what is left out."""
    from rich.console import Console

    from jakiro.utils.logs import quiet_libraries
    from training.data.counts import DataCounts
    from training.data.packing import PackedSequences
    from training.data.report import advice
    from training.data.report import preview as preview_of
    from training.data.token_store import open_tokens
    from training.input_settings import TargetSettings
    from training.setup.loading import load_tokenizer, vocab_size_of

    settings = TargetSettings(name_or_path=target)
    with quiet_libraries():
        tokenizer = load_tokenizer(settings)
        store = open_tokens(
            data,
            tokenizer,
            cache_folder,
            skip_bad_rows=skip_bad_rows,
            vocab_size=vocab_size_of(settings),
        )
    console = Console()
    for document in preview_of(store, tokenizer, preview):
        console.print(document, end="\n\n")
    rows = PackedSequences(store, range(store.num_documents), sequence_length, split)
    if store.counts is not None:
        counts = DataCounts(read=store.counts, packed=rows.counts)
        for line in counts.lines():
            typer.echo(line)
        said = advice(rows.counts, "--split", "--sequence-length")
        if said is not None:
            typer.echo(said)
