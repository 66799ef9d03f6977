"""The commands `jakiro prepare`, `regenerate` and `synthesize`, which write data for training."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from pydantic import Field, NonNegativeInt, PositiveInt

from jakiro.cli import options
from jakiro.cli.output import say, terminated_like_interrupted, writer
from jakiro.cli.settings import LoadSettings
from jakiro.cli.train import RunSettings
from jakiro.errors import ConfigError, DataError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.progress import writing_progress
from jakiro.utils.settings import Settings, load_settings
from jakiro.utils.wording import counted
from training.data.generation import RegenerationSettings, SynthesisSettings

if TYPE_CHECKING:
    from inference import SpeculativeDecoder
    from training.data.regeneration import RegenerationCounts
    from training.data.synthesis import SynthesisCounts

prepare = typer.Typer(
    name="prepare",
    help="Prepare what training and `aded` read: tokens, states of the target, trigrams.",
    no_args_is_help=True,
)


class PrepareSettings(Settings):
    target: str
    """The model to draft for."""
    data: tuple[str, ...] = Field(min_length=1)
    """Data file, folder of data files, or hub dataset as NAME or NAME:SPLIT."""
    sequence_length: int = Field(512, ge=2)
    """Number of tokens of a packed sequence."""
    split: Literal["never", "texts", "all", "alone"] = "texts"
    """Documents that may be split to fill sequences, as for data.split."""
    preview: NonNegativeInt = 0
    """Number of documents to show, with responses in color."""
    skip_bad_records: bool = False
    """Leave out unusable records and report how many; by default, they are errors."""
    cache_folder: Path | None = None
    """Folder for the cached tokens; by default in the user's cache."""


class StateSettings(Settings):
    out: Path
    """Folder to write; for training, set target_states.folder to this folder."""


class TrigramSettings(Settings):
    corpus: tuple[str, ...] = Field(min_length=1)
    """Data file, folder of data files, or hub dataset as NAME or NAME:SPLIT."""
    tokenizer: str
    """The target's tokenizer."""
    out: Path
    """File to write the trigrams to."""
    max_bigrams: PositiveInt = 2**18
    """Largest number of bigrams (pairs of tokens) to keep, each with the tokens that follow it most
    often. A bigram with 12 such successors takes 104 bytes."""
    successors: int = Field(12, ge=1, le=256)
    """Largest number of successors to keep per bigram."""


class WritingSettings(Settings):
    target: str
    """The model that writes the texts."""
    out: Path
    """File to write; the file of an interrupted run is continued."""
    drafter: str | None = Field(
        None,
        description="Drafter that speeds up the target: a folder or hub id, or "
        f"{options.DRAFTERS}.",
    )


class AnswerSettings(WritingSettings):
    data: tuple[str, ...] = Field(min_length=1)
    """Data file, folder of data files, or hub dataset as NAME or NAME:SPLIT."""


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
@options.with_options
@quiet_libraries()
def states(*, run: RunSettings, writing: StateSettings) -> None:
    """Precompute the target's states for the whole dataset, for target_states.source=offline.

    After an interruption, run the same command again to continue. Several processes may write at
    the same time.
    """
    from training.config import TrainSettings

    settings = load_settings(TrainSettings, run.config, run.overrides)
    from jakiro.utils.devices import choose_device
    from jakiro.utils.progress import ProgressDisplay
    from training.module import move_target
    from training.setup.preparation import prepare
    from training.target_states.writer import TargetStateWriter

    device = choose_device(settings.engine.device)
    inputs = prepare(settings)
    states = TargetStateWriter(inputs, writing.out)
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

    from inference.drafters.aded.table import TrigramCounter, save_trigrams, vocabulary_size
    from jakiro.utils.pretrained import load_tokenizer
    from jakiro.utils.progress import ProgressDisplay
    from training.data.documents import encode_documents
    from training.data.sources import Intake, find_sources, read_all

    out = settings.out
    writer(out, "--out", "the trigrams")  # rejects an unusable path before counting
    tokenizer = load_tokenizer(settings.tokenizer)
    columns = (BarColumn(), TextColumn("{task.completed} tokens"), TimeElapsedColumn())
    with ProgressDisplay(TextColumn("Counting"), *columns) as bar:
        task = bar.add_task("Counting tokens", total=None)
        counter = TrigramCounter()
        records = read_all(find_sources(settings.corpus), Intake())
        size = vocabulary_size(tokenizer)
        for document in encode_documents(tokenizer, records, vocab_size=size, any_mask=True):
            counter.add(document.token_ids)
            bar.update(task, completed=counter.num_tokens)
    if counter.num_trigrams == 0:
        raise DataError("no document of the corpus has three tokens, so there are no trigrams")
    index = counter.index(settings.max_bigrams, settings.successors)
    save_trigrams(index, out, tokenizer, counter.num_tokens)
    say(
        f"counted trigrams in {counter.num_tokens} tokens; stored those of {len(index.keys)} "
        f"bigrams in {out}"
    )
    words = ["jakiro", "generate", f"aded={out}", "PROMPT", "--target", "TARGET"]
    say(f"use them with: {shlex.join(words)}")


@options.with_options
def regenerate(
    *,
    answers: AnswerSettings,
    settings: RegenerationSettings,
    load: LoadSettings,
) -> None:
    """Replace the answers in training data with the target's own, for a higher acceptance rate."""
    from training.data.generation import OutputFile
    from training.data.regeneration import Regenerator
    from training.data.sources import find_sources

    data, out = answers.data, answers.out
    read = {Path(name).expanduser().resolve() for name in data}
    if read & {out.resolve(), *out.resolve().parents}:
        raise ConfigError(f"{out} would be read as data when it is continued; choose another --out")
    sources, output = find_sources(data), OutputFile(out)
    regenerator = Regenerator(_load(answers, load), settings)
    total = sum(source.num_records() for source in sources)
    progress = writing_progress("Answering", total)
    with terminated_like_interrupted(), output.kept_when_interrupted(), progress as advance:
        written = regenerator.write(sources, output, advance)
    _report_answers(written, output.num_records, out)


@options.with_options
def synthesize(
    *, writing: WritingSettings, settings: SynthesisSettings, load: LoadSettings
) -> None:
    """Let the target write training data: questions with their answers, or plain texts."""
    from training.data.generation import OutputFile
    from training.data.synthesis import Synthesizer

    output = OutputFile(writing.out)
    synthesizer = Synthesizer(_load(writing, load), settings)
    progress = writing_progress("Writing", settings.conversations)
    with terminated_like_interrupted(), output.kept_when_interrupted(), progress as advance:
        counts = synthesizer.write(output, advance)
    _report_texts(counts, output.num_records, writing.out)


def _load(writing: WritingSettings, load: LoadSettings) -> "SpeculativeDecoder":
    """Return a decoder of the target with its tokenizer."""
    from inference import SpeculativeDecoder
    from inference.loading import parts_over
    from jakiro.utils.pretrained import load_target

    with quiet_libraries():
        model, tokenizer = load_target(writing.target, load.dtype, load.torch_device)
        if writing.drafter is None:
            return SpeculativeDecoder(model, tokenizer=tokenizer)
        parts = parts_over(writing.drafter, model, tokenizer)
        return SpeculativeDecoder(model, parts.drafter, tokenizer)


def _report_answers(written: "RegenerationCounts", num_records: int, out: Path) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {written.records:,} of them new")
    typer.echo(
        f"{counted(written.answers, 'answer')} ({written.tokens:,} tokens), tau {written.tau:.2f}; "
        f"{counted(written.left_out, 'unusable record')} left out"
    )
    if written.cut:
        typer.echo(f"{counted(written.cut, 'answer')} reached the length limit, marked as cut off")


def _report_texts(counts: "SynthesisCounts", num_records: int, out: Path) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {counts.records:,} of them new")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.most_common())
    typer.echo(f"{counts.tokens:,} tokens generated; dropped: {reasons or 'nothing'}")
