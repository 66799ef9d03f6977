"""`jakiro generate`."""

from functools import partial
from typing import Annotated, Literal

import typer

from jakiro.cli.output import say


def generate(
    drafter: Annotated[
        str,
        typer.Argument(
            help="Folder or hub id of a drafter; or, with --target, aded, aded=TABLE, lookup, or "
            "lm=MODEL, a smaller model with the same tokenizer; or two that share trees, such as "
            "aded+drafter=DRAFTER."
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Annotated[
        str | None, typer.Option(help="Where the target is, if not where the drafter says.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the continuation.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    tree: Annotated[
        Literal["trained", "auto"],
        typer.Option(help="Trees as trained, or in each round what pays on this machine."),
    ] = "trained",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile decoding steps; the first ones take long.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print figures to stderr.")] = False,
) -> None:
    """Continue a text as the target would, with the help of its drafter."""
    from inference.decoder import SpeculativeDecoder
    from inference.generation.streaming import TextPrinter

    decoder = SpeculativeDecoder.from_pretrained(
        drafter, target, "auto" if tree == "auto" else None, compiled=compiled
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
