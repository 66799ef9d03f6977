"""The command `jakiro bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import PositiveInt

from inference.benchmark.method_names import parse_methods
from inference.benchmark.settings import ComparisonSettings
from jakiro.cli import options
from jakiro.cli.decoding import LoadSettings
from jakiro.cli.output import STANDARD_OUTPUT, terminated_like_interrupted, writer
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError
from jakiro.utils.extras import require_extra

if TYPE_CHECKING:
    from inference.benchmark.document import ComparisonDocument
    from inference.benchmark.replay.comparison import ReplayDocument
    from inference.benchmark.subject import Subject

_METHODS = """\
transformers                     generate() of transformers
transformers-compiled            generate() with a static cache, compiled during the warm-up
transformers-lookup              generate() with prompt lookup, the fastest of three settings
transformers-assisted=SMALL_LM   generate() with a small model that drafts
autoregressive                   Jakiro's decode loop without a drafter
drafter=PATH                     the loop with a trained drafter
lookup, aded                     the loop with a drafter that needs no training
aded=TABLE                       aded that starts with trigrams counted by `jakiro prepare trigrams`
lm=SMALL_LM                      the loop with a small model that has the target's tokenizer
lookup+drafter=PATH              and other pairs: the loop with two drafters that share trees

Options follow the method after commas, as in drafter=PATH,tree=fixed,name=mine:

name=NAME                 name of the method in the results
tree=auto                 the fastest size, or no tree, in each decoding step (the default)
tree=fixed                trees of one size, with the levels of training
tree=deterministic        drafter=PATH: the likeliest candidates, even if tokens are sampled
tree=sampled              drafter=PATH: candidates are sampled whenever tokens are sampled
candidates=N              largest number of candidates in a tree
levels=M                  drafter=PATH: number of passes of the drafter
settings=FILE.yaml        lookup, aded, lm: settings of the drafter
second-settings=FILE.yaml pairs: settings of the drafter before the plus sign
pair-settings=FILE.yaml   pairs: how the drafters share trees (CombinedSettings)
merged-repeats=N          lookup, aded, tree=deterministic: a path that ends with the same tokens as
                          another path is continued in the same way, up to N candidates in all"""


def _show_methods(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(_METHODS)
        raise typer.Exit
    return is_asked


class BenchSettings(ComparisonSettings):
    """What is compared."""

    threads: PositiveInt | Literal["auto"] | None = "auto"
    """Number of threads of decoding steps on a CPU; auto measures which is fastest."""


@options.with_options
def bench(
    *,
    target: Annotated[
        str, typer.Option(metavar="PATH_OR_HUB_ID", help="The model to decode with.")
    ],
    list_methods: Annotated[
        bool,
        typer.Option(
            "--list-methods", callback=_show_methods, is_eager=True, help="Show all methods."
        ),
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Compare only the tau of trained drafters, on texts that the target writes once. "
            "Methods drafter=PATH with the same name are trainings with different seeds, in the "
            "same order for all names. Trees have 60 deterministic candidates by default.",
        ),
    ] = False,
    json_file: options.JsonOut = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page with tables and plots to this file."),
    ] = None,
    settings: BenchSettings,
    load: LoadSettings,
) -> None:
    """Compare decoding methods on the same prompts: tau and tokens per second."""
    if json_file is not None and json_file == report:
        raise ConfigError("--json and --report name the same file")
    if replay and (report or settings.repeats > 1 or settings.keep_state or settings.baseline):
        raise ConfigError(
            "--replay cannot be combined with --report, --repeats, --keep-state or --baseline"
        )
    store_json = writer(json_file, standard_output=True)  # refuses a file that exists already
    store_page = None if report is None else writer(report, "--report", "the figures")
    if report is not None:
        require_extra("bench")
    with terminated_like_interrupted():
        document: Any = (_replayed if replay else _compared)(settings, target, load)
        try:  # the table first, because a full disk can prevent the files
            _show(document, to_stderr=json_file == STANDARD_OUTPUT)
        finally:
            store_json(document.model_dump_json(indent=1) + "\n")
        if store_page is not None:
            from inference.benchmark.report.page import render  # matplotlib takes a second

            store_page(render(document))
    if not document.is_complete:
        raise typer.Exit(EXIT_CODE_INTERRUPTED)


def _compared(
    settings: ComparisonSettings, target: str, load: LoadSettings
) -> "ComparisonDocument":
    from inference.benchmark.run import Comparison, prompts_for
    from inference.benchmark.subject import build_methods
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.progress import ProgressDisplay, tracked

    prompts = prompts_for(settings)
    with quiet_libraries():
        subject = _subject(settings, target, load)
        methods = build_methods(parse_methods(settings.methods), subject)
    model, tokenizer = subject.model, subject.tokenizer
    comparison = Comparison(settings, prompts, methods, model, tokenizer, target)
    with ProgressDisplay() as progress:
        return comparison.run(tracked(progress))


def _replayed(settings: ComparisonSettings, target: str, load: LoadSettings) -> "ReplayDocument":
    from inference.benchmark.replay.comparison import Replay
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.progress import ProgressDisplay, tracked

    with quiet_libraries():
        subject = _subject(settings.model_copy(update={"threads": None}), target, load)
        comparison = Replay(settings, subject, target)
    with ProgressDisplay() as progress:
        return comparison.run(tracked(progress))


def _subject(settings: ComparisonSettings, target: str, load: LoadSettings) -> "Subject":
    from inference.benchmark.subject import Subject, load_target

    model, tokenizer = load_target(target, load.dtype, load.torch_device)
    return Subject(model, tokenizer, settings.threads, other_weights=settings.other_weights)


def _show(document: "ComparisonDocument | ReplayDocument", *, to_stderr: bool) -> None:
    from rich.console import Console

    from inference.benchmark.document import ComparisonDocument
    from inference.benchmark.replay.comparison import replay_tables
    from inference.benchmark.report.table import figures_table

    console = Console(stderr=to_stderr)
    if isinstance(document, ComparisonDocument):
        tables = figures_table(document)
    else:
        tables = replay_tables(document)
    for part in tables:
        console.print(part, highlight=False)
