"""The command `jakiro verify`."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from pydantic import Field

from inference.losslessness.records import (
    QUICK_SAMPLES,
    Check,
    Report,
    ServerSettings,
    VerifySettings,
)
from jakiro.cli import options
from jakiro.cli.output import STANDARD_OUTPUT, writer
from jakiro.cli.settings import LoadSettings, server_key
from jakiro.errors import ConfigError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.progress import ProgressDisplay, tracked
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from inference.generation.prompts import Prompt


class SubjectSettings(Settings):
    """Options."""

    drafter: str | None = Field(
        None,
        description=f"Folder or hub id of a drafter; or, with --target, {options.DRAFTERS}.",
    )
    target: str | None = None
    """The target; by default the one that the drafter's config names."""
    prompts: Path | None = None
    """Prompt file, as for `jakiro bench`; by default a few built-in prompts."""
    quick: bool = False
    """Sample 200 continuations, which detects large errors only."""
    tree: Literal["auto", "fixed"] = "fixed"
    """Draft trees, as for `jakiro generate`."""
    batch_invariant: bool = False
    """Compute as with `jakiro generate`."""
    json_file: Path | None = None
    """Write all measured values to this file; - for standard output."""


@options.with_options
@quiet_libraries()
def verify(
    *,
    subject: SubjectSettings,
    settings: VerifySettings,
    load: LoadSettings,
    server: ServerSettings,
) -> None:
    """Check on your own models that decoding with a drafter is lossless; exit code 1 if not.

    With --url, check a running server instead: the command runs the target itself, and
    compares its output with the texts of the server.
    """
    from inference.generation.prompt_file import BUILT_IN, read_prompts

    if subject.quick and "samples" not in settings.model_fields_set:
        settings = settings.model_copy(update={"samples": QUICK_SAMPLES})
    path = subject.prompts
    prompts = BUILT_IN if path is None else [prompt.first for prompt in read_prompts(path)]
    store = writer(subject.json_file, standard_output=True)
    show = partial(typer.echo, err=subject.json_file == STANDARD_OUTPUT)

    def show_check(check: Check) -> None:
        show(f"{_word(check.passed)}  {check.name}: {check}")
        for difference in check.differences:
            show(f"      {difference}")

    if server.url is not None and subject.target is not None:
        report = _verify_server(server, subject.target, load, prompts, settings, show_check)
    elif server.url is None and subject.drafter is not None:
        report = _verify(subject.drafter, subject, load, prompts, settings, show_check)
    else:
        raise ConfigError("there is nothing to verify", expected="--drafter, or --url and --target")
    store(report.model_dump_json(indent=2) + "\n")
    show(f"{_word(report.passed)}  {report.target} in {report.dtype}: {report.summary}")
    for remark in report.remarks:
        show(f"note  {remark}")
    if not report.passed:
        raise typer.Exit(1)


def _verify(
    drafter: str,
    subject: SubjectSettings,
    load: LoadSettings,
    prompts: "Sequence[Prompt]",
    settings: VerifySettings,
    show_check: Callable[[Check], None],
) -> Report:
    from inference.decoder import SpeculativeDecoder
    from inference.losslessness.check import verify_losslessness

    decoder = SpeculativeDecoder.from_pretrained(
        drafter,
        subject.target,
        subject.tree,
        threads=None,  # those of the target alone: their number may change rounding
        other_weights=settings.other_weights,
        batch_invariant=subject.batch_invariant,
        dtype=load.dtype,
        device_map=load.torch_device,
    )
    with ProgressDisplay() as progress:
        return verify_losslessness(decoder, prompts, settings, show_check, tracked(progress))


def _verify_server(
    server: ServerSettings,
    target: str,
    load: LoadSettings,
    prompts: "Sequence[Prompt]",
    settings: VerifySettings,
    show_check: Callable[[Check], None],
) -> Report:
    from inference.client import ServerClient
    from inference.losslessness.server import verify_server
    from jakiro.utils.pretrained import load_target

    client = ServerClient(str(server.url), server_key())
    with closing(client), ProgressDisplay() as progress:
        client.connect(server.model)
        return verify_server(
            client,
            *load_target(target, load.dtype, load.torch_device),
            prompts,
            settings,
            chat=server.chat,
            on_check=show_check,
            track=tracked(progress),
        )


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"
