"""`jakiro aded`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli.output import say, writer

aded = typer.Typer(help="Prepare the drafter that needs no training.", no_args_is_help=True)


@aded.callback()
def _group() -> None:
    """Prepare the drafter that needs no training."""


@aded.command()
def build(
    corpus: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Text files, training data (.jsonl, .json, .parquet, a data set of the hub), or "
            "folders of either; may be repeated.",
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="PATH_OR_HUB_ID", help="Where the target's tokenizer is.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The new table.")],
    max_bigrams: Annotated[
        int, typer.Option(min=1, help="The most frequent ones are kept: 104 bytes each.")
    ] = 2**18,
    successors: Annotated[int, typer.Option(min=1, max=256, help="Kept of each bigram.")] = 12,
) -> None:
    """Count a corpus, so that `aded=FILE` need not begin with nothing."""
    from inference.drafters.aded.file import save_trigrams, vocabulary_size
    from inference.drafters.aded.index import check_vocabulary
    from jakiro.utils.pretrained import load_tokenizer
    from training.data.trigram_corpus import corpus_records, count_trigrams

    writer(out, "--out", "the trigrams")  # refuses what cannot be stored before anything is counted
    known = load_tokenizer(tokenizer)
    check_vocabulary(vocabulary_size(known))
    with _progress() as track:
        counter = count_trigrams(known, corpus_records(corpus), track)
    index = counter.index(max_bigrams, successors)
    save_trigrams(index, out, known, counter.num_tokens)
    say(f"{len(index.keys)} bigrams of {counter.num_tokens} tokens in {out}")


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Yield what shows, on standard error, how many tokens were counted."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Counting"),
        BarColumn(),
        TextColumn("{task.completed} tokens"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Counting", total=None)
        yield lambda num_tokens: bar.update(task, completed=num_tokens)
