"""`jakiro bench`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.options import Context, flags_of, settings_from
from jakiro.cli.output import writer
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from inference.benchmark.document import ComparisonDocument, ComparisonSettings
    from inference.benchmark.run import Track

_METHODS = """A decoding method; may be repeated. transformers: its generate(); transformers-lookup:
with prompt lookup, the best of three settings; transformers-assisted=SMALL_LM: with a small model;
autoregressive: our loop without a drafter; drafter=PATH: our loop with a drafter, with options
after commas: tree=trained, tree=auto, tree=deterministic (the best candidates, also where tokens
are sampled) or tree=sampled (candidates are sampled where tokens are, the default); candidates=N,
also with levels=M passes of the drafter, or candidates=costs for the trees that pay best by
measured costs, selected on the last 4 prompts of the file (interleaved by category), which then are
not measured; lookup and aded: our loop with drafters that need no training, aded=TABLE with
trigrams counted by `jakiro aded build`; lm=SMALL_LM: our loop with a small model that has the
target's tokenizer; these three with candidates=N or settings=FILE.yaml after commas;
aded+drafter=PATH, lookup+lm=SMALL_LM and so on: two drafters that share trees, with
beside-settings=FILE.yaml of the first drafter and sharing-settings=FILE.yaml of how they share
trees (CombinedSettings); merged-repeats=N: trees of lookup, aded or tree=deterministic continue
where they repeat themselves, up to N candidates. ,name=NAME names a method."""


def bench(
    context: Context,
    target: Annotated[
        str | None, typer.Option(metavar="PATH_OR_HUB_ID", help="The model to decode with.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help=" ".join(_METHODS.split()))
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL file with prompt, turns or messages on each line, and optionally a "
            "category; or a text file with one prompt per line.",
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Use only the first prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the longest answer.")] = 128,
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", help="0, the default, is greedy; may be repeated."),
    ] = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Times that every prompt is decoded.")] = 1,
    seed: Annotated[
        int, typer.Option(help="Seed of the order of prompts and methods, and of all samples.")
    ] = 0,
    keep_state: Annotated[
        bool,
        typer.Option("--keep-state", help="Adaptive drafters keep learning between prompts."),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="The method that speed-ups are relative to.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page with tables and plots."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json", help="Measure nothing, and show the changes from A to B."
        ),
    ] = None,
) -> None:
    """Compare decoding methods on the same prompts: tau, tokens per second, and time per phase."""
    if compare is not None:
        _refuse_others_beside_compare(context)
        _show_changes(*compare)
        return
    if target is None or not methods or prompts is None:
        raise ConfigError(
            "there is nothing to compare",
            expected="--target, --prompts and at least one --method, or --compare A.json B.json",
            got="not all of them",
            remedy="see `jakiro bench --help`",
        )
    from inference.benchmark.document import ComparisonSettings

    settings = settings_from(context, ComparisonSettings, prompts=str(prompts))
    if json_file is not None and json_file == report:
        raise ConfigError(
            "--json and --report name the same file",
            expected="different names for --json and --report",
            got=report,
        )
    store_json = writer(json_file)
    store_page = None if report is None else writer(report, "--report")
    document = _measured(settings, target, dtype, device)
    _finish(document, store_json, store_page)


def _measured(
    settings: "ComparisonSettings", target: str, dtype: str, device: options.Device
) -> "ComparisonDocument":
    from inference.benchmark.method_names import parse_methods
    from inference.benchmark.run import Comparison, prompts_for, trial_for
    from inference.benchmark.subject import build_methods, load_target
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.pretrained import choose_device

    prompts = prompts_for(settings)
    with quiet_libraries():
        model, tokenizer = load_target(target, dtype, choose_device(device))
        names = parse_methods(settings.methods)
        methods = build_methods(names, model, tokenizer, trial_for(settings))
    comparison = Comparison(settings, prompts, methods, model, tokenizer, target)
    with _progress() as track:
        return comparison.run(track)


def _finish(
    document: "ComparisonDocument",
    store_json: Callable[[str], None],
    store_page: Callable[[str], None] | None,
) -> None:
    from rich.console import Console

    from inference.benchmark.report.table import figures_table

    store_json(document.model_dump_json(indent=1) + "\n")
    if store_page is not None:
        from inference.benchmark.report.page import render  # needs matplotlib, a second

        store_page(render(document))
    console = Console()
    for part in figures_table(document):
        console.print(part, highlight=False)
    if not document.is_complete:
        raise typer.Exit(EXIT_CODE_INTERRUPTED)


def _refuse_others_beside_compare(context: Context) -> None:
    """Refuse options that would have no effect with `--compare`.

    Raises:
        ConfigError: an option has been given besides `--compare`.
    """
    given = [
        flag
        for name, flag in flags_of(context).items()
        if name not in ("compare", "help") and _is_given(context, name)
    ]
    if given:
        raise ConfigError(
            "`--compare` only reads files; it cannot be combined with other options",
            expected="--compare A.json B.json alone",
            got=", ".join(given),
            remedy="leave them out, or measure first and compare the two files afterwards",
        )


def _is_given(context: Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _show_changes(before: Path, after: Path) -> None:
    from rich.console import Console

    from inference.benchmark.diff.change import compare_documents
    from inference.benchmark.diff.table import show_changes
    from inference.benchmark.document import read_document

    show_changes(compare_documents(read_document(before), read_document(after)), Console())


@contextmanager
def _progress() -> "Iterator[Track]":
    """Yield a function that shows progress on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:

        def track(total: int) -> Callable[[], None]:
            task = bar.add_task("Decoding", total=total)
            return lambda: bar.advance(task)

        yield track
