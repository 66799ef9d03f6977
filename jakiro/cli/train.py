"""`jakiro train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli.output import say

if TYPE_CHECKING:
    from training.config import TrainSettings
    from training.distributed.launch import LaunchOptions
    from training.planning.speed import PlannedDevice

_GIB = 2**30


def train(
    config: Annotated[Path, typer.Option(metavar="FILE", help="A YAML file of settings.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Lay a value over the file's; may be repeated."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="On every machine; by default one per GPU, or one without GPUs."),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Several machines, one per line as NAME slots=NUMBER; they share a file system.",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="The first ones of the hostfile only.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="What starts processes on other machines: pdsh, openmpi, slurm, ..."),
    ] = None,
    deepspeed: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="For DeepSpeed's launcher as it is; may be repeated."),
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto", help="Rows read at a time; auto: as many as the estimate allows."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take; needs no weights.")
    ] = False,
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Of a device, if not of this machine's; a dry run takes it for a GPU.",
        ),
    ] = None,
    device_speed: Annotated[
        float | None,
        typer.Option(metavar="TFLOPS", help="Of large products there, if not as measured here."),
    ] = None,
    learning_curve: Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="Train on these shares of the documents, such as 0.25,0.5,1, with equal steps, "
            "and say whether more data would help.",
        ),
    ] = None,
) -> None:
    """Train a drafter, on this machine or several; an interrupted run goes on."""
    from jakiro.utils.settings import load_settings
    from training.config import TrainSettings
    from training.data.report import report_once
    from training.distributed.launch import LaunchOptions
    from training.planning.speed import plan_device, present_device

    words = [*(overrides or ())]
    if micro_batch is not None and micro_batch != "auto":
        words.append(f"batch.micro_batch_size={micro_batch}")
    settings = load_settings(TrainSettings, config, words)
    memory = None if device_memory is None else int(device_memory * _GIB)
    device = (plan_device if dry_run else present_device)(settings, memory)
    if not device.is_here and hostfile is None:
        processes = processes or 1
    taking_part = LaunchOptions(processes, hostfile, nodes, launcher, tuple(deepspeed or ()))
    if micro_batch == "auto":
        settings = _fitting(settings, taking_part, device)
        words.append(f"batch.micro_batch_size={settings.batch.micro_batch_size}")
    settings.batch.accumulation(taking_part.count(settings))  # before anything is started
    if dry_run:
        _say_what_it_takes(settings, taking_part, device, device_speed)
    elif learning_curve is not None:
        with report_once():
            _learn(settings, learning_curve, config, words, taking_part)
    else:
        _run(settings, config, words, taking_part)


def _fitting(
    settings: "TrainSettings", processes: "LaunchOptions", device: "PlannedDevice"
) -> "TrainSettings":
    from training.planning.estimate import choose_micro_batch

    memory = _memory(settings, processes, device)
    fitting = choose_micro_batch(settings, processes.count(settings), memory, device.kind)
    say(f"batch.micro_batch_size: {fitting.batch.micro_batch_size}, as memory allows")
    return fitting


def _say_what_it_takes(
    settings: "TrainSettings",
    processes: "LaunchOptions",
    device: "PlannedDevice",
    speed: float | None,
) -> None:
    from rich.console import Console

    from training.distributed.processes import missing_gpu
    from training.planning.estimate import estimate, render

    found = estimate(settings, processes.count(settings), device.kind)
    if not device.is_here:
        say(
            "planned for a GPU elsewhere: on this machine the run would "
            + ("not start" if settings.engine.device == "cuda" else "compute on the CPU")
            + f" ({missing_gpu()})"
        )
    rate = device.product_rate(settings) if speed is None else speed * 1e12
    memory = _memory(settings, processes, device)
    Console().print(render(found, memory, rate), highlight=False)


def _memory(settings: "TrainSettings", processes: "LaunchOptions", device: "PlannedDevice") -> int:
    if device.memory is not None:  # perhaps elsewhere: nothing is asked of this machine
        return device.memory
    return device.memory_for(processes.local(settings))


def _run(
    settings: "TrainSettings", config: Path, overrides: list[str], processes: "LaunchOptions"
) -> None:
    from training.distributed.launch import command, launch

    if processes.count(settings) == 1 and processes.hostfile is None and not processes.options:
        from training.train import train as train_here

        typer.echo(train_here(settings))
        return
    code = launch(command(settings, config, overrides, processes), settings)
    if code:
        raise typer.Exit(code)
    typer.echo(settings.run_folder.expanduser().absolute() / "drafter")


def _learn(
    settings: "TrainSettings",
    shares: str,
    config: Path,
    overrides: list[str],
    processes: "LaunchOptions",
) -> None:
    from training.studies.learning_curve import LearningCurve, parse_fractions

    curve = LearningCurve(settings, parse_fractions(shares))
    for run in curve.runs:
        if not run.is_finished:
            say(f"learning curve: training on {run.fraction:g} of the documents")
        # A finished run, too: it refuses other settings, and trains nothing again.
        _run(run.settings, config, [*overrides, *run.overrides], processes)
    for line in curve.finish():
        typer.echo(line)
