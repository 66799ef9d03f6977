"""The command `jakiro ablate`."""

from pathlib import Path
from typing import Annotated

import typer

from jakiro.cli import options
from jakiro.cli.output import say
from jakiro.utils.extras import require_extra
from jakiro.utils.logs import quiet_libraries
from training.ablation.settings import StudySettings


@options.with_options
@quiet_libraries()
def ablate(
    *,
    more: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Further files with changes; the shell expands `--config "
            "configs/ablations/*.yaml` to several files.",
        ),
    ] = None,
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
    settings: StudySettings,
) -> None:
    """Train drafter variants of the same size, and show which differences are significant."""
    if not dry_run:
        require_extra("train")
    from training.ablation.study import Study

    arms = (*settings.config, *(more or ()))
    try:
        study = Study(settings.model_copy(update={"config": arms}))
        if dry_run:
            study.estimate()
        elif train_only:
            study.train(train_only)
        else:
            study.complete()
    except KeyboardInterrupt:
        say("to continue the study, run the same command again")
        raise
