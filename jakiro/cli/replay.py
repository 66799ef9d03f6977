"""The command `jakiro replay`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference.benchmark.method_names import DRAFTER
from inference.drafters.names import refuse_missing_drafters
from jakiro.cli import options
from jakiro.cli.interruption import terminated_like_interrupted
from jakiro.cli.options import Context, settings_from
from jakiro.cli.output import STANDARD_OUTPUT, writer
from jakiro.errors import EXIT_CODE_INTERRUPTED
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from inference.benchmark.replay.document import ReplayDocument


@quiet_libraries()
def replay(
    context: Context,
    target: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The model that writes the texts.",
        ),
    ],
    drafters: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            metavar="NAME=PATH",
            help="A trained drafter; may be repeated. Several with the same name are trainings "
            "with different seeds, in the same order for all names. The others are compared with "
            "the first name.",
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            callback=options.existing_file,
            help="Prompt file, as for `jakiro bench`.",
        ),
    ],
    trees: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTIONS",
            help="Size of the trees, as candidates=N or candidates=N,levels=M; may be repeated. By "
            "default candidates=60, with the levels that the drafter was trained for.",
        ),
    ] = None,
    num_prompts: options.NumPrompts = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens of a text.")] = 128,
    temperatures: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Temperature of the texts; 0, the default, for greedy ones; may be repeated.",
        ),
    ] = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    batch_size: Annotated[int, typer.Option(help="Number of prompts to process together.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    other_weights: options.OtherWeights = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json_file: options.JsonOut = None,
) -> None:
    """Compare trained drafters by their tokens per step on the same texts of the target.

    The target writes each text once. The decoding steps of each drafter follow from the text, so
    that comparing several drafters takes less time than decoding with each of them. Candidates are
    deterministic, and speeds are not measured.
    """
    from inference.benchmark.replay.document import ReplaySettings
    from inference.benchmark.replay.names import Size, trainings_of

    settings = settings_from(context, ReplaySettings, prompts=str(prompts))
    for size in settings.trees:
        Size.parse(size)
    for training in trainings_of(settings):
        refuse_missing_drafters(f"{DRAFTER}={training.path}")
    from inference.benchmark.replay.comparison import Replay, prompts_of

    known = prompts_of(settings)
    store = writer(json_file, standard_output=True)
    from inference.benchmark.subject import Subject, load_target
    from jakiro.utils.pretrained import choose_device
    from jakiro.utils.progress import ProgressDisplay, tracked

    with terminated_like_interrupted():
        model, tokenizer = load_target(target, dtype, choose_device(device))
        subject = Subject(model, tokenizer, other_weights=other_weights)
        comparison = Replay(settings, known, subject, target)
        with ProgressDisplay() as progress:
            document = comparison.run(tracked(progress))
        _finish(document, store, to_stderr=json_file == STANDARD_OUTPUT)


def _finish(document: "ReplayDocument", store: Callable[[str], None], *, to_stderr: bool) -> None:
    from rich.console import Console

    from inference.benchmark.replay.table import replay_tables

    console = Console(stderr=to_stderr)
    try:  # the table first, because a full disk can prevent the file
        for part in replay_tables(document):
            console.print(part, highlight=False)
    finally:
        store(document.model_dump_json(indent=1) + "\n")
    if not document.is_complete:
        raise typer.Exit(EXIT_CODE_INTERRUPTED)
