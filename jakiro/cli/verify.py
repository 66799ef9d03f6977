"""The command `jakiro verify`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference.drafters.names import refuse_missing_parts
from jakiro.cli import options
from jakiro.cli.options import DRAFTERS, Context, refuse_given, settings_from
from jakiro.cli.output import STANDARD_OUTPUT, writer
from jakiro.cli.remote_server import AsChat, Concurrency, ServerModel, ServerUrl
from jakiro.cli.verify_server import verify_running_server
from jakiro.errors import ConfigError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.progress import ProgressDisplay, tracked

if TYPE_CHECKING:
    from inference.generation.prompts import Prompt
    from inference.losslessness.records import Check, VerifyReport
    from inference.losslessness.server import ServerCheck, ServerReport

_OF_SERVERS = ("model", "chat", "concurrency")


@quiet_libraries()
def verify(
    context: Context,
    drafter: Annotated[
        str | None,
        typer.Option(help=f"Folder or hub id of a drafter; or, with --target, {DRAFTERS}."),
    ] = None,
    target: options.TargetOfDrafter = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=options.existing_file,
            help="Prompt file, as for `jakiro bench`; by default a few built-in prompts.",
        ),
    ] = None,
    num_prompts: options.NumPrompts = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of a greedy continuation.")
    ] = 64,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Number of continuations to sample for each prompt of --sampled-prompts, at least "
            "50; by default 2000."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Sample 200 continuations, which detects large errors only."),
    ] = False,
    sampled_prompts: Annotated[
        int,
        typer.Option(
            help="Number of prompts, counted from the first, for which continuations are sampled."
        ),
    ] = 1,
    temperature: Annotated[float, typer.Option(help="Temperature of the samples.")] = 1.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same samples.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    tree: options.TreeChoice = "fixed",
    other_weights: options.OtherWeights = False,
    batch_invariant: options.BatchInvariant = False,
    json_file: options.JsonOut = None,
    url: ServerUrl = None,
    model: ServerModel = None,
    chat: AsChat = False,
    concurrency: Concurrency = 8,
) -> None:
    """Check on your own models that decoding with a drafter is lossless; exit code 1 if not.

    With --url, check a running server instead: the command runs the target itself, and
    compares its output with the texts of the server.
    """
    _refuse_unusable(context)
    from inference.losslessness.records import QUICK_SAMPLES, VerifySettings

    count = QUICK_SAMPLES if quick else samples
    if url is None:
        settings_from(context, VerifySettings, samples=count)  # refuses values before slow imports
    from inference.generation.prompt_file import BUILT_IN, read_prompts

    texts = BUILT_IN if prompts is None else [prompt.first for prompt in read_prompts(prompts)]
    store = writer(json_file, standard_output=True)
    show = partial(typer.echo, err=json_file == STANDARD_OUTPUT)

    def show_check(check: "Check | ServerCheck") -> None:
        show(f"{_word(check.passed)}  {check.name}: {check}")
        for detail in check.details:
            show(f"      {detail}")

    report: VerifyReport | ServerReport
    if url is not None:
        report = verify_running_server(context, texts, count, show_check)
    else:
        report = _verified(context, texts, count, show_check)
    store(report.model_dump_json(indent=2) + "\n")
    show(f"{_word(report.passed)}  {report.target} in {report.dtype}: {report.summary}")
    for remark in report.remarks:
        show(f"note  {remark}")
    if not report.passed:
        raise typer.Exit(1)


def _verified(
    context: Context,
    prompts: "Sequence[Prompt]",
    samples: int | None,
    show_check: "Callable[[Check], None]",
) -> "VerifyReport":
    """Verify a decoder as the options of the running command describe."""
    from inference.decoder import SpeculativeDecoder
    from inference.losslessness.check import verify_losslessness
    from inference.losslessness.records import VerifySettings
    from jakiro.utils.pretrained import choose_device

    chosen = context.params
    settings = settings_from(context, VerifySettings, samples=samples)
    decoder = SpeculativeDecoder.from_pretrained(
        chosen["drafter"],
        chosen["target"],
        chosen["tree"],
        threads=None,  # those of the target alone: their number may change how numbers are rounded
        other_weights=chosen["other_weights"],
        batch_invariant=chosen["batch_invariant"],
        dtype=chosen["dtype"],
        device_map=choose_device(chosen["device"]),
    )
    with ProgressDisplay() as progress:
        return verify_losslessness(decoder, prompts, settings, show_check, tracked(progress))


def _refuse_unusable(context: Context) -> None:
    """Raise an error for options that do not fit together, or that name a missing model."""
    chosen = context.params
    if chosen["samples"] is not None and chosen["quick"]:
        raise ConfigError(
            "--quick chooses the number of samples",
            expected="--quick or --samples",
            got=f"--quick --samples {chosen['samples']}",
            remedy="leave one of them out",
        )
    if chosen["url"] is not None:
        return
    refuse_given(context, _OF_SERVERS, "--url")
    if chosen["drafter"] is None:
        raise ConfigError(
            "there is nothing to verify",
            expected="--drafter, or --url and --target",
            got="neither --drafter nor --url",
            remedy="see `jakiro verify --help`",
        )
    refuse_missing_parts(chosen["drafter"], chosen["target"])


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"
