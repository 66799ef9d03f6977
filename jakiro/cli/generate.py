"""The command `jakiro generate`."""

from functools import partial
from typing import Annotated, Literal

import typer

from jakiro.cli import options
from jakiro.cli.options import DRAFTERS
from jakiro.cli.output import say


def generate(
    drafter: Annotated[
        str,
        typer.Argument(help=f"Folder or hub id of a drafter; or, with --target, {DRAFTERS}."),
    ],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            help="The target; by default the one that the drafter's config names.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    tree: Annotated[
        Literal["auto", "fixed"],
        typer.Option(
            help="auto: trees that are chosen in each decoding step by measured costs; fixed: "
            "trees of one shape, with the levels of training."
        ),
    ] = "auto",
    threads: options.ThreadCount = "auto",
    packed: options.PackedWeights = "auto",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile decoding steps; the first steps are then slow."),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print statistics to standard error.")
    ] = False,
) -> None:
    """Continue a text exactly as the target would, sped up by a drafter."""
    from inference.decoder import SpeculativeDecoder
    from inference.generation.streaming import TextPrinter

    decoder = SpeculativeDecoder.from_pretrained(
        drafter,
        target,
        tree,
        compiled=compiled,
        packed=options.as_packed(packed),
        threads=options.as_threads(threads),
    )
    output = decoder.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        streamer=TextPrinter(decoder.tokenizer, partial(typer.echo, nl=False)),
    )
    typer.echo()
    if stats:
        figures = output.stats
        say(
            f"{figures.emitted} tokens, tau {figures.tau:.2f}, {figures.tokens_per_second:.1f}"
            f" tokens/s after {figures.seconds['prefill'] * 1e3:.0f} ms of prefill,"
            f" {decoder.bytes_per_token} bytes per cached token"
        )
