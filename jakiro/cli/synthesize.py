"""The command `jakiro synthesize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jakiro.cli import options
from jakiro.cli.options import Context, settings_from
from jakiro.cli.regenerate import load_decoder
from jakiro.utils.progress import writing_progress
from jakiro.utils.wording import counted

if TYPE_CHECKING:
    from training.data.synthesis import SynthesisCounts
    from training.data.synthesis_settings import SynthesisSettings


def synthesize(
    context: Context,
    target: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The model that writes the conversations.",
        ),
    ],
    conversations: Annotated[int, typer.Option(help="Number of records in the finished file.")],
    out: options.RecordsOut,
    kind: Annotated[
        Literal["chats", "texts"],
        typer.Option(
            help="chats: conversations that a chat model writes; texts: plain texts that a base "
            "model writes."
        ),
    ] = "chats",
    multi_turn: Annotated[
        float, typer.Option(help="Share of the conversations with more than one question.")
    ] = 0.3,
    max_turns: Annotated[
        int, typer.Option(help="Largest number of questions in a conversation.")
    ] = 3,
    greedy: Annotated[
        float, typer.Option(help="Share of the conversations with greedy answers.")
    ] = 0.5,
    temperature: Annotated[
        float, typer.Option(help="Temperature of questions, texts and sampled answers.")
    ] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample from the most likely tokens with this total probability (top-p)."
        ),
    ] = 0.99,
    max_question_tokens: Annotated[
        int,
        typer.Option(help="Largest number of tokens of a question; longer questions are dropped."),
    ] = 256,
    max_new_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of an answer or a text.")
    ] = 512,
    batch_size: Annotated[int, typer.Option(help="Number of records to write together.")] = 16,
    seed: Annotated[int, typer.Option(help="The same seed gives the same records.")] = 0,
    drafter: options.WritingDrafter = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Let the target write training data: questions with their answers, or plain texts."""
    from training.data.regeneration.output_file import OutputFile
    from training.data.synthesis_settings import SynthesisSettings

    settings, output = settings_from(context, SynthesisSettings), OutputFile(out)
    from training.data.synthesis import Synthesizer

    synthesizer = Synthesizer(load_decoder(target, drafter, dtype, device), settings)
    progress = writing_progress("Writing", conversations, settings.batch_size)
    with output.kept_when_interrupted(), progress as advance:
        counts = synthesizer.write(output, advance)
    _report(counts, settings, output.num_records, out)


def _report(
    counts: "SynthesisCounts", settings: "SynthesisSettings", num_records: int, out: Path
) -> None:
    typer.echo(f"{counted(num_records, 'record')} in {out}, {counts.records:,} of them new")
    if settings.kind == "chats":
        greedy, multi_turn = counts.greedy / num_records, counts.multi_turn / num_records
        typer.echo(
            f"shares: {greedy:.1%} with greedy answers, {multi_turn:.1%} with several questions"
        )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.most_common())
    typer.echo(f"{counts.tokens:,} tokens generated; dropped: {reasons or 'nothing'}")
