"""The command `jakiro regenerate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.options import Context, settings_from
from jakiro.utils.progress import writing_progress
from jakiro.utils.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from inference import SpeculativeDecoder
    from training.data.regeneration.regenerator import RegenerationCounts
    from training.data.regeneration.settings import RegenerationSettings
    from training.data.sources import Source


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
    from training.data.regeneration.output_file import OutputFile, check_apart
    from training.data.regeneration.settings import RegenerationSettings
    from training.data.sources import find_sources

    settings = settings_from(context, RegenerationSettings)
    check_apart(out, data)
    sources, output = find_sources(data), OutputFile(out)
    from training.data.regeneration.regenerator import Regenerator, check_template

    inputs = _inputs_fingerprint(target, drafter, dtype, settings, sources)
    if inputs is not None and output.is_finished_from(inputs):
        typer.echo(f"{counted(output.num_records, 'record')} in {out}, 0 of them new")
        return

    def check(tokenizer: "PreTrainedTokenizerBase") -> None:
        check_template(tokenizer, sources, settings)

    regenerator = Regenerator(load_decoder(target, drafter, dtype, device, check), settings)
    total = sum(source.num_records() for source in sources)
    progress = writing_progress("Answering", total, settings.batch_size)
    with output.kept_when_interrupted(), progress as advance:
        written = regenerator.write(sources, output, advance)
    if inputs is not None and output.path.exists():
        output.mark_finished(inputs)
    _report(written, output.num_records, out, temperature)


def _inputs_fingerprint(
    target: str,
    drafter: str | None,
    dtype: str,
    settings: "RegenerationSettings",
    sources: "Sequence[Source]",
) -> str | None:
    """Return a hash of all that determines the answers, with sizes and times of the target's files.

    Without a local copy of the target, or if a drafter takes part in sampling, return None.
    """
    from jakiro.utils.files import fingerprint
    from jakiro.utils.pretrained import model_files

    files = model_files(target)
    if files is None or (settings.temperature and drafter is not None):
        return None
    options = settings.model_dump(exclude={"batch_size"})
    return fingerprint(target, files, dtype, options, [source.fingerprint() for source in sources])


def load_decoder(
    target: str,
    drafter: str | None,
    dtype: str,
    device: options.Device,
    check: Callable[["PreTrainedTokenizerBase"], object],
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
        check(tokenizer)
        if drafter is None:
            return SpeculativeDecoder(model, tokenizer=tokenizer, packed="auto")
        parts = parts_over(drafter, model, tokenizer)
        return SpeculativeDecoder(model, parts.drafter, tokenizer, packed="auto")


def _report(written: "RegenerationCounts", num_records: int, out: Path, temperature: float) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {written.records:,} of them new")
    typer.echo(
        f"{counted(written.answers, 'answer')} ({written.tokens:,} tokens), tau {written.tau:.2f}; "
        f"{counted(written.left_out, 'unusable record')} left out"
    )
    if written.kept:
        kept = counted(written.kept, "record")
        typer.echo(f"{kept} without answers that had been cut off: unchanged")
    if written.cut:
        remedy = "choose another --out" if temperature else "only their records are answered again"
        typer.echo(
            f"{counted(written.cut, 'answer')} reached the length limit, marked as cut off; "
            f"with a larger --max-new-tokens, {remedy}"
        )
