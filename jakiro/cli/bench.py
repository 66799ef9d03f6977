"""The command `jakiro bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference.benchmark.method_names import methods_of, parse_methods, parse_replayed_methods
from jakiro.cli import options
from jakiro.cli.interruption import terminated_like_interrupted
from jakiro.cli.options import Context, settings_from
from jakiro.cli.output import STANDARD_OUTPUT, say, writer
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError
from jakiro.utils.extras import require_extra

if TYPE_CHECKING:
    from inference.benchmark.document import ComparisonDocument
    from inference.benchmark.settings import ComparisonSettings

_METHODS = """\
transformers                     generate() of transformers
transformers-lookup              generate() with prompt lookup, the fastest of three settings
transformers-assisted=SMALL_LM   generate() with a small model that drafts
autoregressive                   Jakiro's decode loop without a drafter
drafter=PATH                     the loop with a trained drafter
lookup, aded                     the loop with a drafter that needs no training
aded=TABLE                       aded that starts with trigrams counted by `jakiro aded build`
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


def bench(
    context: Context,
    target: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The model to decode with.",
        ),
    ],
    methods: Annotated[
        list[str],
        typer.Option(
            "--method",
            metavar="METHOD",
            help="A decoding method, such as transformers, autoregressive, lookup or drafter=PATH; "
            "may be repeated. --list-methods shows all methods and their options.",
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            callback=options.existing_file,
            help="JSONL file with one of the keys prompt, turns and messages on each line, and "
            "optionally the key category; or a text file with one prompt per line.",
        ),
    ],
    list_methods: Annotated[
        bool,
        typer.Option(
            "--list-methods", callback=_show_methods, is_eager=True, help="Show all methods."
        ),
    ] = False,
    num_prompts: options.NumPrompts = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Largest number of new tokens per prompt.")
    ] = 128,
    temperatures: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Temperature; 0, the default, for greedy decoding; may be repeated.",
        ),
    ] = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    batch_size: Annotated[int, typer.Option(help="Number of prompts to decode together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Number of times to decode every prompt.")] = 1,
    seed: Annotated[
        int, typer.Option(help="Seed for the order of prompts and methods, and for sampling.")
    ] = 0,
    keep_state: Annotated[
        bool,
        typer.Option(
            "--keep-state",
            help="Let adaptive drafters keep what they learn from one prompt for the next ones.",
        ),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="Name of the method that speed-ups are relative to.")
    ] = None,
    threads: options.ThreadCount = "auto",
    packed: options.PackedWeights = "auto",
    other_weights: options.OtherWeights = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json_file: options.JsonOut = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page with tables and plots to this file."),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Compare only the tau of trained drafters, on texts that the target writes once. "
            "Methods drafter=PATH with the same name are trainings with different seeds, in the "
            "same order for all names. Trees have 60 deterministic candidates by default.",
        ),
    ] = False,
) -> None:
    """Compare decoding methods on the same prompts: tau, tokens per second, and time per phase."""
    for name in parse_replayed_methods(methods) if replay else parse_methods(methods):
        name.refuse_missing()
    from inference.benchmark.settings import ComparisonSettings

    settings = settings_from(
        context,
        ComparisonSettings,
        prompts=str(prompts),
        threads=options.as_threads(threads),
        packed=options.as_packed(packed),
    )
    if replay:
        store = writer(json_file, standard_output=True)
        _replay(settings, target, dtype, device, store, to_stderr=json_file == STANDARD_OUTPUT)
        return
    methods_of(settings)  # refuses what does not fit together before the slow imports
    if json_file is not None and report is not None and json_file.resolve() == report.resolve():
        raise ConfigError(
            "--json and --report name the same file",
            expected="different names for --json and --report",
            got=report,
        )
    store_json = writer(json_file, standard_output=True)
    store_page = None if report is None else writer(report, "--report", "the figures")
    if report is not None:
        require_extra("bench")
    with terminated_like_interrupted():
        document = _measured(settings, target, dtype, device)
        _finish(document, store_json, store_page, to_stderr=json_file == STANDARD_OUTPUT)


def _replay(
    settings: "ComparisonSettings",
    target: str,
    dtype: str,
    device: options.Device,
    store: Callable[[str], None],
    *,
    to_stderr: bool,
) -> None:
    from rich.console import Console

    from inference.benchmark.replay.comparison import Replay, replay_tables
    from inference.benchmark.subject import Subject, load_target
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.pretrained import choose_device
    from jakiro.utils.progress import ProgressDisplay, tracked

    with quiet_libraries():
        model, tokenizer = load_target(target, dtype, choose_device(device))
        subject = Subject(model, tokenizer, other_weights=settings.other_weights)
        comparison = Replay(settings, subject, target)
    with ProgressDisplay() as progress:
        document = comparison.run(tracked(progress))
    console = Console(stderr=to_stderr)
    for part in replay_tables(document):
        console.print(part, highlight=False)
    store(document.model_dump_json(indent=1) + "\n")


def _measured(
    settings: "ComparisonSettings", target: str, dtype: str, device: options.Device
) -> "ComparisonDocument":
    from inference.benchmark.run import Comparison, prompts_for
    from inference.benchmark.subject import Subject, build_methods, load_target
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.pretrained import choose_device
    from jakiro.utils.progress import ProgressDisplay, tracked

    prompts = prompts_for(settings)
    with quiet_libraries():
        model, tokenizer = load_target(target, dtype, choose_device(device))
        names = parse_methods(settings.methods)
        subject = Subject(
            model,
            tokenizer,
            settings.threads,
            settings.packed,
            "auto",
            settings.other_weights,
        )
        methods = build_methods(names, subject)
    comparison = Comparison(settings, prompts, methods, model, tokenizer, target)
    with ProgressDisplay() as progress:
        return comparison.run(tracked(progress))


def _finish(
    document: "ComparisonDocument",
    store_json: Callable[[str], None],
    store_page: Callable[[str], None] | None,
    *,
    to_stderr: bool,
) -> None:
    from rich.console import Console

    from inference.autotune.measurement import num_disturbed
    from inference.benchmark.report.table import figures_table

    console = Console(stderr=to_stderr)
    try:  # the table first, because a full disk can prevent the files
        for part in figures_table(document):
            console.print(part, highlight=False)
    finally:
        store_json(document.model_dump_json(indent=1) + "\n")
    if store_page is not None:
        from inference.benchmark.report.page import render  # imports matplotlib; takes a second

        store_page(render(document))
    if (count := num_disturbed()) > 1:
        say(f"{count} measurements of costs were disturbed; a later run repeats them")
    if not document.is_complete:
        raise typer.Exit(EXIT_CODE_INTERRUPTED)
