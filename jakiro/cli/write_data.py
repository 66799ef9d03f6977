"""The commands `jakiro regenerate` and `jakiro synthesize`, in which the target writes data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.decoding import LoadSettings
from jakiro.cli.output import terminated_like_interrupted
from jakiro.errors import ConfigError
from jakiro.utils.progress import writing_progress
from jakiro.utils.wording import counted
from training.data.generation import RegenerationSettings, SynthesisSettings

if TYPE_CHECKING:
    from inference import SpeculativeDecoder
    from training.data.regeneration import RegenerationCounts
    from training.data.synthesis import SynthesisCounts

_Target = Annotated[
    str, typer.Option(metavar="PATH_OR_HUB_ID", help="The model that writes the texts.")
]


@options.with_options
def regenerate(
    *,
    target: _Target,
    data: options.DataPaths,
    out: options.RecordsOut,
    drafter: options.WritingDrafter = None,
    settings: RegenerationSettings,
    load: LoadSettings,
) -> None:
    """Replace the answers in training data with the target's own, for a higher acceptance rate."""
    from training.data.generation import OutputFile
    from training.data.regeneration import Regenerator
    from training.data.sources import find_sources

    read = {Path(name).expanduser().resolve() for name in data}
    if read & {out.resolve(), *out.resolve().parents}:
        raise ConfigError(f"{out} would be read as data when it is continued; choose another --out")
    sources, output = find_sources(data), OutputFile(out)
    regenerator = Regenerator(_load(target, drafter, load), settings)
    total = sum(source.num_records() for source in sources)
    progress = writing_progress("Answering", total, settings.batch_size)
    with terminated_like_interrupted(), output.kept_when_interrupted(), progress as advance:
        written = regenerator.write(sources, output, advance)
    _report_answers(written, output.num_records, out)


@options.with_options
def synthesize(
    *,
    target: _Target,
    out: options.RecordsOut,
    drafter: options.WritingDrafter = None,
    settings: SynthesisSettings,
    load: LoadSettings,
) -> None:
    """Let the target write training data: questions with their answers, or plain texts."""
    from training.data.generation import OutputFile
    from training.data.synthesis import Synthesizer

    output = OutputFile(out)
    synthesizer = Synthesizer(_load(target, drafter, load), settings)
    progress = writing_progress("Writing", settings.conversations, settings.batch_size)
    with terminated_like_interrupted(), output.kept_when_interrupted(), progress as advance:
        counts = synthesizer.write(output, advance)
    _report_texts(counts, settings, output.num_records, out)


def _load(target: str, drafter: str | None, load: LoadSettings) -> "SpeculativeDecoder":
    """Return a decoder of the target with its tokenizer; without a drafter if its name is None."""
    from inference import SpeculativeDecoder
    from inference.benchmark.subject import load_target
    from inference.loading import parts_over
    from jakiro.utils.logs import quiet_libraries

    with quiet_libraries():
        model, tokenizer = load_target(target, load.dtype, load.torch_device)
        if drafter is None:
            return SpeculativeDecoder(model, tokenizer=tokenizer)
        parts = parts_over(drafter, model, tokenizer)
        return SpeculativeDecoder(model, parts.drafter, tokenizer)


def _report_answers(written: "RegenerationCounts", num_records: int, out: Path) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {written.records:,} of them new")
    typer.echo(
        f"{counted(written.answers, 'answer')} ({written.tokens:,} tokens), tau {written.tau:.2f}; "
        f"{counted(written.left_out, 'unusable record')} left out"
    )
    if written.cut:
        typer.echo(f"{counted(written.cut, 'answer')} reached the length limit, marked as cut off")


def _report_texts(
    counts: "SynthesisCounts", settings: SynthesisSettings, num_records: int, out: Path
) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {counts.records:,} of them new")
    if settings.kind == "chats":
        greedy, multi_turn = counts.greedy / num_records, counts.multi_turn / num_records
        typer.echo(
            f"shares: {greedy:.1%} with greedy answers, {multi_turn:.1%} with several questions"
        )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.most_common())
    typer.echo(f"{counts.tokens:,} tokens generated; dropped: {reasons or 'nothing'}")
