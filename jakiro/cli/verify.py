"""`jakiro verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jakiro.cli.output import writer

if TYPE_CHECKING:
    from inference.losslessness import Check


def verify(
    drafter: Annotated[
        str,
        typer.Option(
            help="Folder or hub id of a drafter; or, with --target, aded, aded=TABLE, lookup, or "
            "lm=MODEL, a smaller model with the same tokenizer; or two that share trees, such as "
            "aded+drafter=DRAFTER."
        ),
    ],
    target: Annotated[
        str | None, typer.Option(help="Where the target is, if not where the drafter says.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One prompt per line: plain text, or .jsonl with the key prompt or messages; "
            "by default a few built-in ones.",
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Use the first ones only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of greedy continuations.")] = 64,
    samples: Annotated[int, typer.Option(help="Continuations drawn from a prompt.")] = 2000,
    sampled_prompts: Annotated[int, typer.Option(help="Draw from this many prompts.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="By default the target's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="By default the target's own.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same samples.")] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="float32 leaves no room for rounding; auto is the target's own."),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Store the figures here, too.")
    ] = None,
) -> None:
    """Check on your own models that decoding with this drafter is lossless; exit code 1 if not."""
    from inference.decoder import SpeculativeDecoder
    from inference.generation.prompt_file import BUILT_IN, read_prompts
    from inference.losslessness import VerifySettings, verify_losslessness
    from jakiro.utils.settings import validate_settings
    from training.distributed.processes import choose_device

    options = {
        "max_new_tokens": max_new_tokens,
        "num_prompts": num_prompts,
        "samples": samples,
        "sampled_prompts": sampled_prompts,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    settings = validate_settings(VerifySettings, options, source="the command line")
    texts = BUILT_IN if prompts is None else read_prompts(prompts)
    store = writer(json_file)
    decoder = SpeculativeDecoder.from_pretrained(
        drafter, target, dtype=dtype, device_map=choose_device(device)
    )
    report = verify_losslessness(decoder, texts, settings, on_check=_show_check)
    store(report.model_dump_json(indent=2) + "\n")
    typer.echo(f"{_word(report.passed)}  {report.target} in {report.dtype}: {report.summary}")
    if not report.passed:
        raise typer.Exit(1)


def _show_check(check: "Check") -> None:
    typer.echo(f"{_word(check.passed)}  {check.name}: {check}")
    for detail in check.details:
        typer.echo(f"      {detail}")


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"
