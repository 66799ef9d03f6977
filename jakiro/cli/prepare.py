"""The commands of `jakiro prepare`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field, NonNegativeInt, PositiveInt

from jakiro.cli import options
from jakiro.cli.output import say, writer
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import Settings, load_settings

prepare = typer.Typer(
    name="prepare",
    help="Prepare what training and `aded` read: tokens, states of the target, trigrams.",
    no_args_is_help=True,
)


class PrepareSettings(Settings):
    """Options."""

    target: str
    """The model to draft for."""
    data: tuple[str, ...] = Field(min_length=1)
    """Data file, folder of data files, or hub dataset as NAME or NAME:SPLIT."""
    sequence_length: int = Field(512, ge=2)
    """Number of tokens of a packed sequence."""
    split: Literal["never", "texts", "all"] = "texts"
    """Documents that may be split to fill sequences, as for data.split."""
    preview: NonNegativeInt = 0
    """Number of documents to show, with responses in color."""
    skip_bad_records: bool = False
    """Leave out unusable records and report how many; by default, they are errors."""
    cache_folder: Path | None = None
    """Folder for the cached tokens; by default in the user's cache."""


class TrigramSettings(Settings):
    """Options."""

    corpus: tuple[str, ...] = Field(min_length=1)
    """Text file, training data (.jsonl, .json, .parquet, or a dataset on the hub), or a folder of
    such files."""
    tokenizer: str
    """The target's tokenizer."""
    out: Path
    """File to write the trigrams to."""
    max_bigrams: PositiveInt = 2**18
    """Largest number of bigrams (pairs of tokens) to keep, each with the tokens that follow it most
    often. A bigram with 12 such successors takes 104 bytes."""
    successors: int = Field(12, ge=1, le=256)
    """Largest number of successors to keep per bigram."""


@prepare.command()
@options.with_options
def data(*, settings: PrepareSettings) -> None:
    """Tokenize data into the cache that training uses, and report what was read and left out."""
    from rich.console import Console

    from training.data.packing import PackedSequences
    from training.data.token_store import open_tokens
    from training.data.token_store import preview as preview_of
    from training.input_settings import TargetSettings
    from training.setup.preparation import load_tokenizer, vocab_size_of

    target = TargetSettings(name_or_path=settings.target)
    with quiet_libraries():
        tokenizer = load_tokenizer(target)
        store = open_tokens(
            settings.data,
            tokenizer,
            settings.cache_folder,
            skip_bad_records=settings.skip_bad_records,
            vocab_size=vocab_size_of(target),
        )
    console = Console()
    for document in preview_of(store, tokenizer, settings.preview):
        console.print(document, end="\n\n", soft_wrap=True)
    documents = range(store.num_documents)
    sequences = PackedSequences(store, documents, settings.sequence_length, settings.split)
    for line in sequences.report():
        typer.echo(line)


@prepare.command()
@quiet_libraries()
def states(
    config: options.SettingsFile,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write; for training, set target_states.folder to this folder.",
        ),
    ],
    overrides: options.Overrides = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read finished shards again, and replace damaged ones."),
    ] = False,
) -> None:
    """Precompute the target's states for the whole dataset, for target_states.source=offline.

    After an interruption, run the same command again to continue. Several processes may write at
    the same time.
    """
    from training.config import TrainSettings

    settings = load_settings(TrainSettings, config, overrides or ())
    from jakiro.utils.pretrained import choose_device
    from jakiro.utils.progress import ProgressDisplay
    from training.module import move_target
    from training.setup.preparation import prepare
    from training.target_states.writer import TargetStateWriter

    device = choose_device(settings.engine.device)
    inputs = prepare(settings)
    states = TargetStateWriter(inputs, out)
    if check and (damaged := states.drop_damaged()):
        typer.echo(f"damaged: {', '.join(damaged)}")
    typer.echo(str(states))
    move_target(inputs.target, device, needs_layers=True)
    with ProgressDisplay() as bar:
        task = bar.add_task("Sequences", total=states.num_sequences_left)
        is_complete = states.write(lambda count: bar.advance(task, count))
    if is_complete:
        typer.echo(f"all target states are in {states.folder}")
    else:
        say("other processes are writing the remaining shards")


@prepare.command()
@options.with_options
@quiet_libraries()
def trigrams(*, settings: TrigramSettings) -> None:
    """Count the trigrams of a corpus and store them in a file, for the drafter `aded=FILE`."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from inference.drafters.aded.file import save_trigrams
    from jakiro.utils.pretrained import load_tokenizer
    from jakiro.utils.progress import ProgressDisplay
    from training.data.trigram_corpus import corpus_records, count_trigrams

    out = settings.out
    writer(out, "--out", "the trigrams")  # rejects an unusable path before counting
    tokenizer = load_tokenizer(settings.tokenizer)
    columns = (BarColumn(), TextColumn("{task.completed} tokens"), TimeElapsedColumn())
    with ProgressDisplay(TextColumn("Counting"), *columns) as bar:
        task = bar.add_task("Counting tokens", total=None)
        counter = count_trigrams(
            tokenizer,
            corpus_records(settings.corpus),
            lambda number: bar.update(task, completed=number),
        )
    index = counter.index(settings.max_bigrams, settings.successors)
    save_trigrams(index, out, tokenizer, counter.num_tokens)
    say(
        f"counted trigrams in {counter.num_tokens} tokens; stored those of {len(index.keys)} "
        f"bigrams in {out}"
    )
    words = ["jakiro", "generate", f"aded={out}", "PROMPT", "--target", "TARGET"]
    say(f"use them with: {shlex.join(words)}")
