"""The command `jakiro synthesize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.decoding import LoadSettings
from jakiro.cli.regenerate import load_decoder
from jakiro.utils.progress import writing_progress
from jakiro.utils.wording import counted
from training.data.generation_settings import SynthesisSettings

if TYPE_CHECKING:
    from training.data.synthesis import SynthesisCounts


@options.with_options
def synthesize(
    *,
    target: Annotated[
        str, typer.Option(metavar="PATH_OR_HUB_ID", help="The model that writes the conversations.")
    ],
    out: options.RecordsOut,
    drafter: options.WritingDrafter = None,
    settings: SynthesisSettings,
    load: LoadSettings,
) -> None:
    """Let the target write training data: questions with their answers, or plain texts."""
    from training.data.output_file import OutputFile
    from training.data.synthesis import Synthesizer

    output = OutputFile(out)
    synthesizer = Synthesizer(load_decoder(target, drafter, load), settings)
    progress = writing_progress("Writing", settings.conversations, settings.batch_size)
    with output.kept_when_interrupted(), progress as advance:
        counts = synthesizer.write(output, advance)
    _report(counts, settings, output.num_records, out)


def _report(
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
