"""The commands of `jakiro profile`."""

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli.options import Context, existing_file, existing_model, settings_from
from jakiro.cli.output import say
from jakiro.utils.dtype_names import long_dtype
from jakiro.utils.logs import quiet_libraries

profile = typer.Typer(
    name="profile", help="Measure the parts of the decode engine.", no_args_is_help=True
)

_Target = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_HUB_ID",
        callback=existing_model,
        help="The target; by default a small model with random weights.",
    ),
]
_Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"],
    typer.Option(
        metavar="float32|bfloat16|float16",
        callback=long_dtype,
        help="Dtype of target and drafter; fp32, bf16 and fp16 are accepted as well.",
    ),
]
_Device = Annotated[str, typer.Option(help="Device to compute on, such as cpu or cuda:1.")]
_Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Trained drafter; by default a drafter with random weights, about as large as a "
        "target layer.",
    ),
]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=existing_file,
        help="Prompt file, as for `jakiro bench`; by default built-in prompts. A model with "
        "random weights gets random prompts.",
    ),
]
_Count = Annotated[int, typer.Option(help="Number of prompts.")]
_PromptTokens = Annotated[int, typer.Option(help="Number of tokens to keep, from a prompt's end.")]
_NewTokens = Annotated[int, typer.Option(help="Number of new tokens per prompt.")]


@profile.command()
@quiet_libraries()
def engine(
    context: Context,
    target: _Target = None,
    dtype: _Dtype = "float32",
    device: _Device = "cpu",
    drafter: _Drafter = None,
    prompts: Annotated[int, typer.Option(help="Number of random prompts.")] = 12,
    new_tokens: _NewTokens = 97,
    repeats: Annotated[int, typer.Option(help="Number of runs of each single decoding step.")] = 24,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="autoregressive|overhead|growth|batches|oracle",
            help="Take only this measurement; may be repeated.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only check that everything runs, in a few seconds.")
    ] = False,
) -> None:
    """Compare speed and overhead of the decode loop with transformers, and print them as JSON."""
    from inference.benchmark.machine import emit
    from inference.profiling.engine import EngineProfileSettings, measure_engine

    emit(measure_engine(settings_from(context, EngineProfileSettings)))


@profile.command()
@quiet_libraries()
def automatic(
    context: Context,
    target: _Target = None,
    dtype: _Dtype = "float32",
    device: _Device = "cpu",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Trained drafter, measured in addition to a useless one with random weights.",
        ),
    ] = None,
    prompts: _Prompts = None,
    count: _Count = 20,
    prompt_tokens: _PromptTokens = 128,
    new_tokens: _NewTokens = 48,
    temperatures: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", help="0 for greedy decoding; may be repeated; by default 0 and 1."
        ),
    ] = None,
) -> None:
    """Compare tree=auto with autoregressive decoding, and print one JSON document."""
    from inference.benchmark.machine import emit
    from inference.profiling.automatic import AutomaticSettings, measure_automatic

    emit(measure_automatic(settings_from(context, AutomaticSettings)))


@profile.command()
@quiet_libraries()
def rounding(
    context: Context,
    target: _Target = None,
    dtype: _Dtype = "bfloat16",
    device: _Device = "cpu",
    drafter: _Drafter = None,
    prompts: _Prompts = None,
    count: _Count = 20,
    prompt_tokens: _PromptTokens = 128,
    new_tokens: _NewTokens = 64,
) -> None:
    """Count the greedy tokens that depend on rounding, and print one JSON document."""
    from inference.benchmark.machine import emit
    from inference.profiling.rounding import RoundingSettings, measure_rounding

    emit(measure_rounding(settings_from(context, RoundingSettings)))


@profile.command()
@quiet_libraries()
def gpu(
    context: Context,
    device: Annotated[
        str, typer.Option(help="Device to measure on, such as cuda:1; cpu only with --quick.")
    ] = "cuda",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="File to create for the results, which is rewritten after every measurement; by "
            "default gpu-TIME.json in the current folder.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="machine|autoregressive|verify|step|draft|recordings|headline|batch",
            help="Run only this section; may be repeated.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only check that every section works, with a tiny target."),
    ] = False,
) -> None:
    """Measure decoding on a GPU in half an hour, with an 8B target that has random weights.

    The exit code is 1 if tokens are wrong or logits are not finite.
    """
    from inference.profiling.gpu.run import GPUProfileSettings, measure_gpu
    from jakiro.utils.files import ensure_new_file, write_atomically

    settings = settings_from(context, GPUProfileSettings)
    path = json_file or Path(f"gpu-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    ensure_new_file(path, "the measured values", "--json")
    document = measure_gpu(settings, partial(write_atomically, path))
    say(f"wrote {path}")
    if not document.is_valid:
        raise typer.Exit(1)
