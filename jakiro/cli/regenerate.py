"""The command `jakiro regenerate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.options import Context, settings_from
from jakiro.utils.progress import writing_progress
from jakiro.utils.wording import counted

if TYPE_CHECKING:
    from inference import SpeculativeDecoder
    from training.data.regeneration.regenerator import RegenerationCounts


def regenerate(
    context: Context,
    target: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The model that writes the answers.",
        ),
    ],
    data: options.DataPaths,
    out: options.RecordsOut,
    drafter: options.WritingDrafter = None,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    max_new_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of an answer.")
    ] = 512,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Largest number of tokens at the start of a plain text to use as its prompt."
        ),
    ] = 64,
    batch_size: Annotated[int, typer.Option(help="Number of records to answer together.")] = 8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    skip_bad_records: options.SkipBadRecords = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Replace the answers in training data with the target's own, for a higher acceptance rate."""
    from training.data.regeneration.output_file import OutputFile
    from training.data.regeneration.settings import RegenerationSettings
    from training.data.sources import find_sources

    settings = settings_from(context, RegenerationSettings)
    sources, output = find_sources(data), OutputFile(out)
    from training.data.regeneration.regenerator import Regenerator

    regenerator = Regenerator(load_decoder(target, drafter, dtype, device), settings)
    total = sum(source.num_records() for source in sources)
    progress = writing_progress("Answering", total, settings.batch_size)
    with output.kept_when_interrupted(), progress as advance:
        written = regenerator.write(sources, output, advance)
    _report(written, output.num_records, out)


def load_decoder(
    target: str, drafter: str | None, dtype: str, device: options.Device
) -> "SpeculativeDecoder":
    """Return a decoder of the target with its tokenizer.

    Args:
        target: folder or hub id of the target.
        drafter: folder, hub id or name of the drafter; None for autoregressive decoding.
        dtype: dtype of the target.
        device: device of the target.
        check: function that may refuse the target's tokenizer, before anything is measured.
    """
    from inference import SpeculativeDecoder
    from inference.benchmark.subject import load_target
    from inference.loading import parts_over
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.pretrained import choose_device

    with quiet_libraries():
        model, tokenizer = load_target(target, dtype, choose_device(device))
        if drafter is None:
            return SpeculativeDecoder(model, tokenizer=tokenizer, packed="auto")
        parts = parts_over(drafter, model, tokenizer)
        return SpeculativeDecoder(model, parts.drafter, tokenizer, packed="auto")


def _report(written: "RegenerationCounts", num_records: int, out: Path) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {written.records:,} of them new")
    typer.echo(
        f"{counted(written.answers, 'answer')} ({written.tokens:,} tokens), tau {written.tau:.2f}; "
        f"{counted(written.left_out, 'unusable record')} left out"
    )
    if written.cut:
        typer.echo(f"{counted(written.cut, 'answer')} reached the length limit, marked as cut off")
