"""`jakiro bench`."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jakiro.cli.output import EXIT_CODE_INTERRUPTED, writer
from jakiro.errors import ConfigError

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
    target: Annotated[
        str | None, typer.Option(metavar="PATH_OR_HUB_ID", help="The model to decode with.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help=" ".join(_METHODS.split()))] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One JSON object per line with prompt, turns or messages, and perhaps a category; "
            "or a text file of one prompt per line.",
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Use the first ones only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer to each turn.")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy, the default; may be repeated.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="By default the target's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="By default the target's own.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Times that every prompt is decoded.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order of everything, and of all draws.")] = 0,
    keep_state: Annotated[
        bool,
        typer.Option(
            "--keep-state", help="Methods that learn go on learning from prompt to prompt."
        ),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="The method that speed-ups are over.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the target; auto is its own."),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Store all figures here.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Store a page with tables and plots.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json", help="Measure nothing: say what changed from A to B."
        ),
    ] = None,
) -> None:
    """Compare ways to decode the same prompts: tokens per forward, speed, and where time goes."""
    options = dict(locals())
    if compare is not None:
        _refuse_others_beside_compare(options)
        _say_what_changed(*compare)
        return
    if target is None or not method or prompts is None:
        raise ConfigError(
            "there is nothing to compare",
            expected="--target, --prompts and at least one --method, or --compare A.json B.json",
            got="not all of them",
            remedy="see `jakiro bench --help`",
        )
    from inference.benchmark.document import ComparisonSettings
    from jakiro.utils.settings import validate_settings

    values = {
        "methods": method,
        "prompts": str(prompts),
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "temperatures": temperature or [0.0],
        "top_p": top_p,
        "top_k": top_k,
        "batch_size": batch_size,
        "repeats": repeats,
        "seed": seed,
        "keep_state": keep_state,
        "baseline": baseline,
    }
    settings = validate_settings(ComparisonSettings, values, source="the command line")
    if json_file is not None and json_file == report:
        raise ConfigError(
            "figures and page need a file each",
            expected="different names for --json and --report",
            got=report,
        )
    store_json = writer(json_file)
    store_page = None if report is None else writer(report, "--report")
    document = _measured(settings, target, dtype, device)
    _finish(document, store_json, store_page)


def _measured(
    settings: "ComparisonSettings",
    target: str,
    dtype: str,
    device: Literal["auto", "cpu", "cuda"],
) -> "ComparisonDocument":
    from inference.benchmark.method_names import parse_methods
    from inference.benchmark.run import Comparison, prompts_for, trial_for
    from inference.benchmark.subject import build_methods, load_target
    from jakiro.utils.logs import quiet_libraries
    from training.distributed.processes import choose_device

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


def _refuse_others_beside_compare(options: Mapping[str, object]) -> None:
    """Raise if an option beside `--compare` is not at its default: it would do nothing."""
    given = [
        "--json" if name == "json_file" else f"--{name.replace('_', '-')}"
        for name, parameter in signature(bench).parameters.items()
        if name != "compare" and options[name] != parameter.default
    ]
    if given:
        raise ConfigError(
            "--compare measures nothing, so that other options have no effect beside it",
            expected="--compare A.json B.json alone",
            got=", ".join(given),
            remedy="leave them out, or measure first and compare the two files then",
        )


def _say_what_changed(before: Path, after: Path) -> None:
    from rich.console import Console

    from inference.benchmark.diff.change import compare_documents
    from inference.benchmark.diff.table import show_changes
    from inference.benchmark.document import read_document

    show_changes(compare_documents(read_document(before), read_document(after)), Console())


@contextmanager
def _progress() -> "Iterator[Track]":
    """Yield what shows steps on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:

        def track(total: int) -> Callable[[], None]:
            task = bar.add_task("Decoding", total=total)
            return lambda: bar.advance(task)

        yield track
