"""The commands `jakiro init`, `train` and `ablate`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import PositiveInt

from jakiro.cli import options
from jakiro.cli.output import say
from jakiro.errors import EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED
from jakiro.utils.files import ensure_new_file
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.packaged import require_extra
from jakiro.utils.settings import Settings, load_settings
from training.ablation.settings import StudySettings
from training.launch import LaunchOptions, command, launch

if TYPE_CHECKING:
    from jakiro.utils.devices import Kind
    from training.config import TrainSettings

_GIB = 2**30
_FILES = (".json", ".jsonl", ".parquet")  # suffixes of training data in files


class InitSettings(Settings):
    data: tuple[str, ...] = ()
    """Training data: a JSON, JSONL or Parquet file, a folder of such files, or a dataset of the
    hub. By default, the file that the printed command `jakiro synthesize` writes."""
    drafter: str | None = None
    """An architecture: jakiro for all parts of this package, jakiro-published as in the paper, moa,
    eagle3 or a relative (see the page Drafter); by default, a single layer that starts as the
    target's last layer."""
    out: Path = Path("my.yaml")
    """Settings file to write."""


class RunSettings(Settings):
    """Settings of the run."""

    config: Path
    """YAML file with the settings of a training run, or the name of a packaged one."""
    overrides: tuple[str, ...] = ()
    """Replace a value of the settings file."""


class PlanSettings(Settings):
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Number of sequences in a forward pass of a process; auto: as many as fit into memory."""
    dry_run: bool = False
    """Only estimate memory, disk space and time. No weights are downloaded, and data is tokenized
    only if epochs is set."""
    device_memory: float | None = None
    """Memory of the device to plan for, if that device is in another machine. On a machine without
    a GPU, a dry run with this option plans for a GPU unless engine.device is cpu."""


class AblateSettings(Settings):
    dry_run: bool = False
    """Only estimate time and disk space; write nothing."""
    train_only: tuple[str, ...] = ()
    """Train only this arm, and stop before the measurement on test prompts. The arm without changes
    is called base. With this option, several processes can train different arms at the same time.
    Then run the same command without this option to measure all arms and write the results."""


@options.with_options
def init(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_HUB_ID",
            help="The target; only its config is read.",
            show_default=False,
        ),
    ],
    settings: InitSettings,
) -> None:
    """Write the settings of a first training run for a target, and show the next commands."""
    out, drafter = settings.out, settings.drafter
    ensure_new_file(out, "the settings")
    from training.planning.starter import short_name, starter_yaml

    name = short_name(target)
    paths = settings.data or (f"{name}-chats.jsonl",)
    out.write_text(starter_yaml(target, paths, drafter), encoding="utf-8")
    for path in settings.data:
        if Path(path).suffix in _FILES and not Path(path).exists():
            say(f"warning: there is no file {path} yet; with it, init knows how much to hold out")
    typer.echo(f"wrote {out}; next:")
    write_data = ["synthesize", "--target", target, "--conversations", "1000", "--out", paths[0]]
    train = ["train", "--config", str(out)]
    run = name if drafter is None else f"{name}-{drafter}"
    verify = ["verify", "--drafter", f"runs/{run}/drafter"]
    for words in (*([] if settings.data else [write_data]), [*train, "--dry-run"], train, verify):
        typer.echo(f"  {shlex.join(['jakiro', *words])}")


@options.with_options
def train(*, run: RunSettings, plan: PlanSettings, launched: LaunchOptions) -> None:
    """Train a drafter on this machine; the same command continues an interrupted run."""
    words = [*run.overrides]
    if plan.micro_batch_size not in (None, "auto"):
        words.append(f"batch.micro_batch_size={plan.micro_batch_size}")
    from training.config import TrainSettings

    settings = load_settings(TrainSettings, run.config, words)
    if not plan.dry_run:
        require_extra("train")
    from jakiro.utils.devices import choose_device
    from training.planning.estimate import choose_micro_batch, memory_here, planned_kind

    kind = planned_kind(settings, plan.device_memory)
    is_elsewhere = kind == "cuda" and choose_device("auto").type == "cpu"
    if is_elsewhere and launched.processes is None:
        launched = launched.model_copy(update={"processes": 1})
    count = launched.count(settings)
    memory = int((plan.device_memory or 0) * _GIB) or memory_here(kind, count)
    if plan.micro_batch_size == "auto":
        settings = choose_micro_batch(settings, count, memory, kind)
        size = settings.batch.micro_batch_size
        say(f"batch.micro_batch_size: {size}, which fits into memory")
        words.append(f"batch.micro_batch_size={size}")
    settings.batch.accumulation(count)  # rejects unsuitable sizes
    if plan.dry_run:
        _show_estimate(settings, count, kind, memory)
        return
    _run(settings, run.config, words, launched)


def _show_estimate(settings: "TrainSettings", processes: int, kind: "Kind", memory: int) -> None:
    from rich.console import Console

    from jakiro.utils.devices import choose_device
    from training.planning.estimate import estimate, product_rate, render

    estimated = estimate(settings, processes, kind)
    is_here = kind == "cpu" or choose_device("auto").type == "cuda"
    rate = product_rate(settings) if is_here else None
    Console().print(render(estimated, memory, rate), highlight=False)


def _run(
    settings: "TrainSettings", config: Path, overrides: list[str], processes: LaunchOptions
) -> None:
    if processes.count(settings) == 1:
        from training.train import train as train_here

        typer.echo(train_here(settings))
        return
    code = launch(command(settings, config, overrides, processes), settings)
    if code not in (0, EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED):
        say(
            f"error: a process of the run failed or was killed (exit code {code}); remedy: see its "
            "output above; the same command resumes the run from its last checkpoint"
        )
    if code:
        raise typer.Exit(code)
    typer.echo(settings.run_folder.expanduser().absolute() / "drafter")


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
    part: AblateSettings,
    settings: StudySettings,
) -> None:
    """Train drafter variants of the same size, and show which differences are significant."""
    if not part.dry_run:
        require_extra("train")
    from training.ablation.study import Study

    arms = (*settings.config, *(more or ()))
    try:
        study = Study(settings.model_copy(update={"config": arms}))
        if part.dry_run:
            study.estimate()
        elif part.train_only:
            study.train(part.train_only)
        else:
            study.complete()
    except KeyboardInterrupt:
        say("to continue the study, run the same command again")
        raise
