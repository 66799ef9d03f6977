"""The command `jakiro bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from inference.benchmark.settings import ComparisonSettings
from jakiro.cli import options
from jakiro.cli.output import STANDARD_OUTPUT, terminated_like_interrupted, writer
from jakiro.cli.settings import LoadSettings
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.packaged import require_extra
from jakiro.utils.settings import Settings

_METHODS = """\
transformers                     generate() of transformers
transformers-compiled            generate() with a static cache, compiled during the warm-up
transformers-lookup[=N]          generate() with prompt lookup of N tokens (default: 10)
autoregressive                   Jakiro's decode loop without a drafter
drafter=PATH                     the loop with a trained drafter
lookup, aded                     the loop with a drafter that needs no training
aded=TABLE                       aded that starts with trigrams counted by `jakiro prepare trigrams`
lm=SMALL_LM                      the loop with a small model that has the target's tokenizer
lookup+drafter=PATH              and other pairs: the loop with two drafters that share trees

Options follow the method after commas, as in drafter=PATH,tree=fixed,name=mine:

name=NAME                 name of the method in the results
tree=auto                 the fastest size, or no tree, in each decoding step (the default)
tree=fixed                trees of one size, with the levels of training; of sampled candidates if
                          tokens are sampled
tree=deterministic        drafter=PATH: the likeliest candidates, even if tokens are sampled
candidates=N              largest number of candidates in a tree
levels=M                  drafter=PATH: number of passes of the drafter
settings=FILE.yaml        lookup, aded, lm: settings of the drafter
merged-repeats=N          lookup, aded, tree=deterministic: a path that ends with the same tokens as
                          another path is continued in the same way, up to N candidates in all"""


class OutputSettings(Settings):
    target: str
    """The model to decode with."""
    json_file: Path | None = None
    """Write all measured values to this file; - for standard output."""
    report: Path | None = None
    """Write an HTML page with tables and plots to this file."""


def _show_methods(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(_METHODS)
        raise typer.Exit
    return is_asked


@options.with_options
def bench(
    *,
    list_methods: Annotated[
        bool,
        typer.Option(
            "--list-methods", callback=_show_methods, is_eager=True, help="Show all methods."
        ),
    ] = False,
    output: OutputSettings,
    settings: ComparisonSettings,
    load: LoadSettings,
) -> None:
    """Compare decoding methods on the same prompts: tau and tokens per second."""
    json_file, report = output.json_file, output.report
    if json_file is not None and json_file == report:
        raise ConfigError("--json and --report name the same file")
    if settings.replay and report is not None:
        raise ConfigError("--replay measures no speeds, so it has no --report")
    store_json = writer(json_file, standard_output=True)  # refuses a file that exists already
    store_page = writer(report, "--report", "the figures")
    if report is not None:
        require_extra("bench")
    with terminated_like_interrupted():
        document = _measure(output.target, settings, load)
        from rich.console import Console

        from inference.benchmark.report import page_of, show

        try:  # the table first, because a full disk can prevent the files
            show(document, Console(stderr=json_file == STANDARD_OUTPUT))
        finally:
            store_json(document.model_dump_json(indent=1) + "\n")
        if report is not None:
            store_page(page_of(document))
    if not document.is_complete:
        raise typer.Exit(EXIT_CODE_INTERRUPTED)


def _measure(target: str, settings: ComparisonSettings, load: LoadSettings) -> Any:
    from inference.benchmark.run import compare, prompts_for
    from inference.benchmark.subject import Subject
    from jakiro.utils.pretrained import load_target
    from jakiro.utils.progress import ProgressDisplay, tracked

    prompts = prompts_for(settings)  # before the models are loaded
    # Threads that are chosen by their speed would round differently in a later replay.
    threads = None if settings.replay and settings.threads == "auto" else settings.threads
    with quiet_libraries():
        model, tokenizer = load_target(target, load.dtype, load.torch_device)
    subject = Subject(model, tokenizer, threads, other_weights=settings.other_weights)
    with quiet_libraries(), ProgressDisplay() as progress:
        return compare(settings, prompts, subject, target, tracked(progress))
