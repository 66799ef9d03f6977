"""The command `jakiro bench`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference.benchmark.method_names import DRAFTER, methods_of, parse_methods
from jakiro.cli import options
from jakiro.cli.bench_server import (
    OF_SERVERS,
    BadShare,
    CheckedAlone,
    CutShare,
    DeviceDrafterName,
    LoadRequests,
    LoadSeconds,
    LostShare,
    RequestTimeout,
    UnstreamedShare,
    bench_server,
)
from jakiro.cli.interruption import terminated_like_interrupted
from jakiro.cli.options import Context, refuse_given, refuse_others, settings_from
from jakiro.cli.output import STANDARD_OUTPUT, say, writer
from jakiro.cli.remote_server import AsChat, Concurrency, ServerModel, ServerUrl
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError
from jakiro.utils.extras import require_extra

if TYPE_CHECKING:
    from inference.benchmark.document import ComparisonDocument
    from inference.benchmark.settings import ComparisonSettings

_OF_COSTS = ("costs", "target", "methods", "dtype", "device")
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
candidates=costs          drafter=PATH: the trees that are fastest by measured costs. They are
                          selected on 4 prompts, which are excluded from the results
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
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The model to decode with.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="A decoding method, such as transformers, autoregressive, lookup or drafter=PATH; "
            "may be repeated. --list-methods shows all methods and their options.",
        ),
    ] = None,
    list_methods: Annotated[
        bool,
        typer.Option(
            "--list-methods", callback=_show_methods, is_eager=True, help="Show all methods."
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=options.existing_file,
            help="JSONL file with one of the keys prompt, turns and messages on each line, and "
            "optionally the key category; or a text file with one prompt per line.",
        ),
    ] = None,
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
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            help="Measure and print the costs that automatic choices depend on, instead of "
            "decoding. Only --target is required. --method drafter=PATH adds a drafter's costs.",
        ),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json", help="Show the changes from A to B instead of measuring."
        ),
    ] = None,
    url: ServerUrl = None,
    model: ServerModel = None,
    chat: AsChat = False,
    concurrency: Concurrency = 8,
    requests: LoadRequests = None,
    seconds: LoadSeconds = None,
    check: CheckedAlone = False,
    unstreamed_share: UnstreamedShare = 0.0,
    cut_share: CutShare = 0.0,
    bad_share: BadShare = 0.0,
    device_drafter: DeviceDrafterName = None,
    lost_share: LostShare = 0.0,
    timeout: RequestTimeout = 600.0,
) -> None:
    """Compare decoding methods on the same prompts: tau, tokens per second, and time per phase.

    With --url, measure a running server instead: times to the first token and between tokens,
    tokens per second, and errors.
    """
    if url is not None:
        bench_server(context, prompts, json_file)
        return
    refuse_given(context, OF_SERVERS, "--url")
    if compare is not None:
        refuse_others(context, {"compare"}, "--compare only reads files")
        _show_changes(*compare)
        return
    if costs and target is not None:
        refuse_others(context, _OF_COSTS, "--costs only measures costs")
        _show_costs(target, methods or [], dtype, device)
        return
    if target is None or not methods or prompts is None:
        raise ConfigError(
            "there is nothing to compare",
            expected="--target, --prompts and at least one --method; or --target and --costs; or "
            "--compare A.json B.json; or --url and --prompts",
            got=f"no {' and no '.join(_missing(target, methods, prompts))}",
            remedy="see `jakiro bench --help`",
        )
    for name in parse_methods(methods):
        name.refuse_missing()
    from inference.benchmark.settings import ComparisonSettings

    settings = settings_from(
        context,
        ComparisonSettings,
        prompts=str(prompts),
        threads=options.as_threads(threads),
        packed=options.as_packed(packed),
    )
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


def _missing(
    target: str | None, methods: Sequence[str] | None, prompts: Path | None
) -> Iterator[str]:
    """Yield the options that a comparison lacks."""
    given = {"--target": target, "--method": methods, "--prompts": prompts}
    yield from (name for name, value in given.items() if not value)


def _measured(
    settings: "ComparisonSettings", target: str, dtype: str, device: options.Device
) -> "ComparisonDocument":
    from inference.benchmark.run import Comparison, prompts_for, trial_for
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
            trial_for(settings),
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


def _show_costs(target: str, methods: Sequence[str], dtype: str, device: options.Device) -> None:
    """Measure the costs again, without reading or changing the user's cache, and print them."""
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from inference.benchmark.costs_table import costs_tables
    from inference.benchmark.subject import load_target
    from jakiro.drafter import JakiroDrafter
    from jakiro.target.adapter import TargetAdapter
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.pretrained import choose_device

    with quiet_libraries():
        model, _ = load_target(target, dtype, choose_device(device))
        drafters = {
            name.name: JakiroDrafter.from_pretrained(str(name.path)).eval().to(model.device)
            for name in parse_methods(methods)
            if name.kind == DRAFTER
        }
    adapter = TargetAdapter(model.eval())
    console = Console()
    with TemporaryDirectory() as folder:
        fitted = {name: drafter.to(dtype=adapter.dtype) for name, drafter in drafters.items()}
        for table in costs_tables(adapter, fitted, Path(folder)):
            console.print(table, highlight=False)


def _show_changes(before: Path, after: Path) -> None:
    options.existing_file(before)
    options.existing_file(after)
    from rich.console import Console

    from inference.benchmark.diff import compare_documents, show_changes
    from inference.benchmark.document import read_document

    show_changes(compare_documents(read_document(before), read_document(after)), Console())
