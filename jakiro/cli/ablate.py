"""`jakiro ablate`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli import options
from jakiro.cli.options import Context, settings_from
from jakiro.cli.output import say
from jakiro.errors import ConfigError

_SWEEP = "Select a setting for each arm"
_MEASURING = "Measurement"


def ablate(
    context: Context,
    base: Annotated[Path, typer.Option(metavar="FILE", help="Settings of a training run.")],
    config: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Ablation: changes to the base; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of runs and results.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="More ablations, so that `--config configs/ablations/*.yaml` takes all files.",
        ),
    ] = None,
    overrides: options.Overrides = None,
    seeds: Annotated[int, typer.Option(help="Runs of every arm.")] = 3,
    max_steps: Annotated[
        int | None, typer.Option(help="Shorten all runs to this number of steps.")
    ] = None,
    launcher: Annotated[
        Literal["inline", "deepspeed"],
        typer.Option(help="Train in this process, or on all devices of this machine."),
    ] = "inline",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate time and size; write nothing.")
    ] = False,
    train_only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARM",
            help="Train this arm and stop before measuring on test prompts; may be repeated. The "
            "base is called base. Several processes can thus share the training; the same command "
            "without this option measures and writes the results.",
        ),
    ] = None,
    rerun: Annotated[str | None, typer.Option(metavar="ARM", help="Train this arm again.")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY.PATH=VALUE,VALUE,...",
            help="Train every arm with each value and the first seed, and continue with the value "
            "that has the highest tau on dev prompts (geometric mean over temperatures); for "
            "numbers that all arms share, such as optimizer.learning_rate.",
            rich_help_panel=_SWEEP,
        ),
    ] = None,
    dev_prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts that select the value; no test prompt may be among them.",
            rich_help_panel=_SWEEP,
        ),
    ] = None,
    dev_num_prompts: Annotated[
        int | None,
        typer.Option(help="By default as many as --num-prompts.", rich_help_panel=_SWEEP),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompt file of `jakiro bench`; by default the starts of validation data.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(help="Largest number of prompts.", rich_help_panel=_MEASURING)
    ] = 40,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of the longest answer.", rich_help_panel=_MEASURING)
    ] = 64,
    temperatures: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            help="0 is greedy; may be repeated; by default 0 and 1.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    candidates: Annotated[
        int, typer.Option(help="Nodes of a draft tree.", rich_help_panel=_MEASURING)
    ] = 8,
    trees: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTIONS",
            help="Kind of trees that every arm is measured with instead; may be repeated. It has "
            "the options of a drafter of `jakiro bench`: "
            "tree=deterministic,candidates=60,levels=8, or candidates=costs (4 prompts then select "
            "the trees and are not reported on). A sweep uses --candidates.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Times that every prompt is decoded.", rich_help_panel=_MEASURING)
    ] = 1,
) -> None:
    """Train variants of a drafter at equal size and show which differences are significant."""
    if dry_run and train_only:
        raise ConfigError(
            "--dry-run trains nothing",
            expected="either --dry-run or --train-only",
            got="both",
            remedy="leave out one of them",
        )
    from training.data.report import report_once
    from training.studies.ablation.settings import StudySettings
    from training.studies.ablation.study import Study

    settings = settings_from(context, StudySettings, config=(*config, *(more or ())))
    try:
        with report_once():
            study = Study(settings)
            if dry_run:
                study.estimate()
            elif train_only:
                study.train(train_only, rerun=rerun)
            else:
                study.complete(rerun=rerun)
    except KeyboardInterrupt:
        without = ", without --rerun" if rerun else ""
        say(f"the same command continues where this one stopped{without}")
        raise
