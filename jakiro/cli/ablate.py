"""The command `jakiro ablate`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jakiro.cli import options
from jakiro.cli.options import Context, settings_from
from jakiro.cli.output import say
from jakiro.utils.extras import require_extra
from jakiro.utils.logs import quiet_libraries

_MEASURING = "Measurement"


@quiet_libraries()
def ablate(
    context: Context,
    base: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            callback=options.readable_settings,
            help="YAML file with the settings of a training run.",
        ),
    ],
    config: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="YAML file with changes to the base. Each such file is an arm of the study, named "
            "after the file; may be repeated.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for runs and results.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Further files with changes; the shell expands `--config "
            "configs/ablations/*.yaml` to several files.",
        ),
    ] = None,
    overrides: options.Overrides = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds to train every arm with.")] = 3,
    max_steps: Annotated[
        int | None,
        typer.Option(
            help="Largest number of steps of a training run; it also replaces a number of epochs."
        ),
    ] = None,
    any_size: Annotated[
        bool,
        typer.Option(
            "--any-size",
            help="Also compare arms that no expert width makes as large as the base; they keep the "
            "width in their settings.",
        ),
    ] = False,
    launcher: Annotated[
        Literal["inline", "deepspeed"],
        typer.Option(
            help="inline: train in this process; deepspeed: train on all devices of this machine."
        ),
    ] = "inline",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate time and disk space; write nothing.")
    ] = False,
    train_only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARM",
            help="Train only this arm, and stop before the measurement on test prompts; may be "
            "repeated. The arm without changes is called base. With this option, several processes "
            "can train different arms at the same time. Then run the same command without this "
            "option to measure all arms and write the results.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=options.existing_file,
            help="Prompt file, as for `jakiro bench`; by default, the prompts are the beginnings "
            "of validation documents.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(help="Largest number of prompts.", rich_help_panel=_MEASURING)
    ] = 40,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Largest number of new tokens per prompt.", rich_help_panel=_MEASURING),
    ] = 64,
    temperatures: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            help="Temperature, 0 for greedy decoding; may be repeated; by default 0 and 1.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            help="Name of this measurement, such as the kind of its prompts. Its results are "
            "written into a folder of this name inside --out, and measurements with different "
            "names share the trainings.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    trees: Annotated[
        str,
        typer.Option(
            metavar="OPTIONS",
            help="Draft trees of all arms, written with the options of a drafter in `jakiro "
            "bench`, such as tree=deterministic,candidates=60,levels=8.",
            rich_help_panel=_MEASURING,
        ),
    ] = "candidates=8",
    repeats: Annotated[
        int,
        typer.Option(help="Number of times to decode every prompt.", rich_help_panel=_MEASURING),
    ] = 1,
) -> None:
    """Train drafter variants of the same size, and show which differences are significant."""
    if not dry_run:
        require_extra("train")
    arms = (*config, *(more or ()))
    for path in arms:
        options.readable_settings(path)
    from training.studies.ablation.settings import StudySettings
    from training.studies.ablation.study import Study

    settings = settings_from(context, StudySettings, config=arms)
    try:
        study = Study(settings)
        if dry_run:
            study.estimate()
        elif train_only:
            study.train(train_only)
        else:
            study.complete()
    except KeyboardInterrupt:
        say("to continue the study, run the same command again")
        raise
