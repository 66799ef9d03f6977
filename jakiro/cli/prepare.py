"""The command `jakiro prepare`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli import options


def prepare(
    target: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The model to draft for.",
        ),
    ],
    data: options.DataPaths,
    sequence_length: Annotated[
        int, typer.Option(min=2, help="Number of tokens of a packed sequence.")
    ] = 512,
    split: Annotated[
        Literal["never", "texts", "all"],
        typer.Option(help="Documents that may be split to fill sequences, as for data.split."),
    ] = "texts",
    preview: Annotated[
        int, typer.Option(min=0, help="Number of documents to show, with responses in color.")
    ] = 0,
    skip_bad_records: options.SkipBadRecords = False,
    cache_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the cached tokens; by default in the user's cache."
        ),
    ] = None,
) -> None:
    """Tokenize data into the cache that training uses, and report what was read and left out."""
    from rich.console import Console

    from jakiro.utils.logs import quiet_libraries
    from training.data.counts import DataCounts
    from training.data.packing import PackedSequences
    from training.data.preview import preview as preview_of
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
            skip_bad_records=skip_bad_records,
            vocab_size=vocab_size_of(settings),
        )
    console = Console()
    for document in preview_of(store, tokenizer, preview):
        console.print(document, end="\n\n", soft_wrap=True)
    sequences = PackedSequences(store, range(store.num_documents), sequence_length, split)
    if store.counts is not None:
        counts = DataCounts(read=store.counts, packed=sequences.counts)
        for line in counts.lines():
            typer.echo(line)
