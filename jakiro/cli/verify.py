"""The command `jakiro verify`."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from pydantic import Field

from inference.losslessness.records import Check, Report, VerifySettings
from jakiro.cli import options
from jakiro.cli.output import STANDARD_OUTPUT, writer
from jakiro.cli.settings import LoadSettings, server_key
from jakiro.errors import ConfigError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import Settings
from jakiro.utils.wording import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from inference.generation.prompts import Prompt
    from jakiro.utils.progress import Track


class SubjectSettings(Settings):
    drafter: str | None = Field(
        None,
        description=f"Folder or hub id of a drafter; or, with --target, {options.DRAFTERS}.",
    )
    target: str | None = None
    """The target; by default the one that the drafter's config names."""
    prompts: Path | None = None
    """Prompt file, as for `jakiro bench`; by default a few built-in prompts."""
    tree: Literal["auto", "fixed"] = "fixed"
    """Draft trees, as for `jakiro generate`."""
    batch_invariant: bool = False
    """Compute as with `jakiro generate`."""
    url: str | None = None
    """Address of a running server with OpenAI's interface, such as http://127.0.0.1:8000/v1, whose
    greedy texts are checked. Its key is read from the environment variable JAKIRO_API_KEY."""
    model: str | None = None
    """Name of the model of the server; by default the only one that it has."""
    json_file: Path | None = None
    """Write all measured values to this file; - for standard output."""


@options.with_options
@quiet_libraries()
def verify(*, subject: SubjectSettings, settings: VerifySettings, load: LoadSettings) -> None:
    """Check on your own models that decoding with a drafter is lossless; exit code 1 if not.

    With --url, check a running server instead: the command runs the target itself, and
    compares its greedy texts with those of the server.
    """
    from inference.generation.prompt_file import BUILT_IN, read_prompts
    from jakiro.utils.progress import ProgressDisplay, tracked

    path = subject.prompts
    prompts = BUILT_IN if path is None else [prompt.first for prompt in read_prompts(path)]
    store = writer(subject.json_file, standard_output=True)
    show = partial(typer.echo, err=subject.json_file == STANDARD_OUTPUT)
    with ProgressDisplay() as progress:
        track = tracked(progress)
        if subject.url is not None and subject.target is not None:
            model, checks = _server_checks(subject, load, prompts, settings, track)
        elif subject.url is None and subject.drafter is not None:
            model, checks = _decoder_checks(subject, load, prompts, settings, track)
        else:
            raise ConfigError(
                "there is nothing to verify", expected="--drafter, or --url and --target"
            )
        done = []
        for check in checks:
            done.append(check)
            show(f"{_word(check.passed)}  {check.name}: {check}")
            for difference in check.differences:
                show(f"      {difference}")
    report = Report(
        target=model.name_or_path,
        dtype=dtype_name(model.dtype),
        url=subject.url,
        settings=settings,
        checks=tuple(done),
    )
    store(report.model_dump_json(indent=2) + "\n")
    show(f"{_word(report.passed)}  {report.target} in {report.dtype}: {report.summary}")
    if report.remark is not None:
        show(f"note  {report.remark}")
    if not report.passed:
        raise typer.Exit(1)


def _decoder_checks(
    subject: SubjectSettings,
    load: LoadSettings,
    prompts: "Sequence[Prompt]",
    settings: VerifySettings,
    track: "Track",
) -> "tuple[PreTrainedModel, Iterator[Check]]":
    from inference.decoder import SpeculativeDecoder
    from inference.losslessness.check import verify_losslessness

    decoder = SpeculativeDecoder.from_pretrained(
        str(subject.drafter),
        subject.target,
        subject.tree,
        threads=None,  # those of the target alone: their number may change rounding
        other_weights=settings.other_weights,
        batch_invariant=subject.batch_invariant,
        dtype=load.dtype,
        device_map=load.torch_device,
    )
    return decoder.target.model, verify_losslessness(decoder, prompts, settings, track)


def _server_checks(
    subject: SubjectSettings,
    load: LoadSettings,
    prompts: "Sequence[Prompt]",
    settings: VerifySettings,
    track: "Track",
) -> "tuple[PreTrainedModel, Iterator[Check]]":
    from inference.client import ServerClient
    from inference.losslessness.server import verify_server
    from jakiro.utils.pretrained import load_target

    with closing(ServerClient(str(subject.url), server_key())) as client:
        client.connect(subject.model)
        model, tokenizer = load_target(str(subject.target), load.dtype, load.torch_device)
        check = verify_server(client, model, tokenizer, prompts, settings, track)
    return model, iter([check])


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"
