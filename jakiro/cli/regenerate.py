"""`jakiro regenerate`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jakiro.cli.prepare import DATA, SKIP

if TYPE_CHECKING:
    from inference import SpeculativeDecoder
    from training.data.regeneration.regenerator import RegenerationCounts


def regenerate(
    target: Annotated[
        str, typer.Option(metavar="PATH_OR_HUB_ID", help="The model that shall answer.")
    ],
    data: Annotated[list[str], typer.Option(metavar="PATH", help=DATA)],
    out: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Receives the rows; continued if begun.")
    ],
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFTER",
            help="Speeds the target up: a folder or hub id, or lookup, aded, aded=TABLE, or "
            "lm=MODEL, a smaller model with the same tokenizer; or two that share trees, such as "
            "aded+drafter=DRAFTER or lookup+lm=MODEL.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(help="Start of a text that is continued.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Rows answered together.")] = 8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help=SKIP)] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the target; auto is its own."),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
) -> None:
    """Let the target write the answers in the data anew; drafters guess these best."""
    from jakiro.utils.settings import validate_settings
    from training.data.regeneration.output_file import OutputFile, check_apart
    from training.data.regeneration.regenerator import RegenerationSettings, Regenerator
    from training.data.sources import find_sources

    values = {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "prompt_tokens": prompt_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "skip_bad_rows": skip_bad_rows,
    }
    settings = validate_settings(RegenerationSettings, values, source="the command line")
    check_apart(out, data)
    sources, output = find_sources(data), OutputFile(out)
    regenerator = Regenerator(_decoder(target, drafter, dtype, device), settings)
    with _progress() as advance:
        written = regenerator.write(sources, output, advance)
    _report(written, output.num_records, out)


def _decoder(
    target: str, drafter: str | None, dtype: str, device: Literal["auto", "cpu", "cuda"]
) -> "SpeculativeDecoder":
    from inference import SpeculativeDecoder
    from inference.benchmark.subject import load_target
    from inference.loading import parts_over
    from jakiro.utils.logs import quiet_libraries
    from training.distributed.processes import choose_device

    with quiet_libraries():
        model, tokenizer = load_target(target, dtype, choose_device(device))
        if drafter is None:
            return SpeculativeDecoder(model, tokenizer=tokenizer)
        parts = parts_over(drafter, model, tokenizer)
        return SpeculativeDecoder(model, parts.drafter, tokenizer)


def _report(written: "RegenerationCounts", num_rows: int, out: Path) -> None:
    typer.echo(f"{num_rows:,} rows in {out}, {written.records:,} of them new")
    typer.echo(
        f"{written.answers:,} answers of {written.tokens:,} tokens, tau {written.tau:.2f}; "
        f"{written.left_out:,} unusable rows left out"
    )
    if written.cut:
        typer.echo(
            f"{written.cut:,} answers were cut off before their end, and are marked as such; "
            "--max-new-tokens allows more"
        )


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Yield what shows on standard error how many rows are done, of nobody knows how many."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} rows"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Answering", total=None)
        yield lambda row: bar.update(task, completed=row)
