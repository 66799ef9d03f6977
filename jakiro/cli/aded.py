"""The commands of `jakiro aded`."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli import options
from jakiro.cli.output import say, writer
from jakiro.utils.logs import quiet_libraries

aded = typer.Typer(
    name="aded", help="Prepare `aded`, a drafter that needs no training.", no_args_is_help=True
)


@aded.callback()
def _group() -> None:
    """Prepare `aded`, a drafter that needs no training."""


@aded.command()
@quiet_libraries()
def build(
    corpus: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Text file, training data (.jsonl, .json, .parquet, or a dataset on the hub), or "
            "a folder of such files; may be repeated.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_tokenizer,
            help="The target's tokenizer.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write the trigrams to.")],
    max_bigrams: Annotated[
        int,
        typer.Option(
            min=1,
            help="Largest number of bigrams (pairs of tokens) to keep, each with the tokens that "
            "follow it most often. A bigram with 12 such successors takes 104 bytes.",
        ),
    ] = 2**18,
    successors: Annotated[
        int, typer.Option(min=1, max=256, help="Largest number of successors to keep per bigram.")
    ] = 12,
) -> None:
    """Count the trigrams of a corpus and store them in a file, for the drafter `aded=FILE`."""
    from inference.drafters.aded.file import save_trigrams
    from jakiro.utils.pretrained import load_tokenizer
    from training.data.trigram_corpus import corpus_records, count_trigrams

    writer(out, "--out", "the trigrams")  # rejects an unusable path before counting
    loaded = load_tokenizer(tokenizer)
    with _progress() as track:
        counter = count_trigrams(loaded, corpus_records(corpus), track)
    index = counter.index(max_bigrams, successors)
    save_trigrams(index, out, loaded, counter.num_tokens)
    say(
        f"counted trigrams in {counter.num_tokens} tokens; stored those of {len(index.keys)} "
        f"bigrams in {out}"
    )
    words = ["jakiro", "generate", f"aded={out}", "PROMPT", "--target", "TARGET"]
    say(f"use them with: {shlex.join(words)}")


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Yield a function that shows the number of counted tokens on standard error."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from jakiro.utils.progress import ProgressDisplay

    columns = (
        TextColumn("Counting"),
        BarColumn(),
        TextColumn("{task.completed} tokens"),
        TimeElapsedColumn(),
    )
    with ProgressDisplay(*columns) as bar:
        task = bar.add_task("Counting tokens", total=None)
        yield lambda num_tokens: bar.update(task, completed=num_tokens)
