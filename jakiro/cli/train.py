"""The command `jakiro train`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jakiro.cli import options
from jakiro.cli.output import say
from jakiro.cli.training_settings import (
    SettingsFile,
    parse_fractions,
    refuse_missing_inputs,
    training_settings,
)
from jakiro.errors import EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED, ConfigError
from jakiro.utils.extras import require_extra

if TYPE_CHECKING:
    from training.config import TrainSettings
    from training.distributed.launch import LaunchOptions
    from training.planning.speed import PlannedDevice

# Largest size in bytes of a target that a dry run loads to time decoding steps.
_LARGEST_TIMED = 4 * 2**30
_GIB = 2**30


def train(
    context: options.Context,
    config: SettingsFile,
    overrides: options.Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes per machine; by default one per GPU, or one if there are no "
            "GPUs.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=options.existing_file,
            help="File that lists machines with a shared file system, each on a line of the form "
            "NAME slots=NUMBER.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of machines to use, in the order of the hostfile; by default all."
        ),
    ] = None,
    deepspeed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Further argument for DeepSpeed's launcher; may be repeated."
        ),
    ] = None,
    micro_batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Number of sequences in a forward pass of a process; auto: as many as fit into "
            "memory.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only estimate memory, disk space and time; if the target is on this machine, "
            "also the tau above which drafting makes decoding faster. No weights are downloaded, "
            "and data is tokenized only if epochs is set.",
        ),
    ] = False,
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory of the device to plan for, if that device is in another machine. On a "
            "machine without a GPU, a dry run with this option plans for a GPU unless "
            "engine.device is cpu.",
        ),
    ] = None,
    device_speed: Annotated[
        float | None,
        typer.Option(
            metavar="TFLOPS",
            help="Speed of large matrix products on the device to plan for, if that device is in "
            "another machine.",
        ),
    ] = None,
    learning_curve: Annotated[
        str | None,
        typer.Option(
            metavar="FRACTIONS",
            help="Train once on each of these fractions of the documents, such as 0.25,0.5,1, for "
            "the same number of steps, and show whether more data would help.",
        ),
    ] = None,
) -> None:
    """Train a drafter on one or several machines; the same command continues an interrupted run."""
    words = [*(overrides or ())]
    if micro_batch_size is not None and micro_batch_size != "auto":
        words.append(f"batch.micro_batch_size={micro_batch_size}")
    settings = training_settings(config, words)
    _refuse_unusable(context, settings)
    from training.distributed.launch import LaunchOptions
    from training.planning.speed import plan_device, present_device

    memory = None if device_memory is None else int(device_memory * _GIB)
    device = (plan_device if dry_run else present_device)(settings, memory)
    if not device.is_here and hostfile is None:
        processes = processes or 1
    launch_options = LaunchOptions(processes, hostfile, nodes, tuple(deepspeed or ()))
    if micro_batch_size == "auto":
        settings = _fitting(settings, launch_options, device)
        words.append(f"batch.micro_batch_size={settings.batch.micro_batch_size}")
    settings.batch.accumulation(launch_options.count(settings))  # rejects unsuitable sizes
    if dry_run:
        _show_estimate(settings, launch_options, device, device_speed)
    elif learning_curve is not None:
        _learn(settings, learning_curve, config, words, launch_options)
    else:
        _run(settings, config, words, launch_options)
        for command in _next_commands(settings):
            say(f"next: {command}")


def _refuse_unusable(context: options.Context, settings: "TrainSettings") -> None:
    """Raise an error for the mistakes that can be found before the slow imports."""
    chosen = context.params
    if chosen["dry_run"] and chosen["learning_curve"] is not None:
        raise ConfigError(
            "a dry run estimates a single run, not a learning curve",
            expected="either --dry-run or --learning-curve",
            got="both",
            remedy="leave out --learning-curve; each of its runs takes as many steps, and so about "
            "as much time, as the run on all documents",
        )
    if not chosen["dry_run"]:
        require_extra("train")
    if chosen["learning_curve"] is not None:
        parse_fractions(chosen["learning_curve"])
    if chosen["micro_batch_size"] != "auto":
        # With more processes, unsuitable sizes do not fit either.
        settings.batch.accumulation(chosen["processes"] or 1)
    # A dry run may plan for another machine, on which the data may lie.
    is_elsewhere = chosen["device_memory"] is not None or settings.engine.device == "cuda"
    if not (chosen["dry_run"] and is_elsewhere):
        refuse_missing_inputs(settings)


def _fitting(
    settings: "TrainSettings", processes: "LaunchOptions", device: "PlannedDevice"
) -> "TrainSettings":
    from training.planning.estimate import choose_micro_batch

    memory = _memory(settings, processes, device)
    fitting = choose_micro_batch(settings, processes.count(settings), memory, device.kind)
    say(f"batch.micro_batch_size: {fitting.batch.micro_batch_size}, which fits into memory")
    return fitting


def _show_estimate(
    settings: "TrainSettings",
    processes: "LaunchOptions",
    device: "PlannedDevice",
    speed: float | None,
) -> None:
    from rich.console import Console

    from jakiro.utils.pretrained import missing_gpu
    from training.data.sources import find_sources
    from training.planning.estimate import estimate, render

    if device.is_here:  # otherwise the data may be in the other machine, too
        find_sources(settings.data.paths)  # rejects paths that do not exist
    found = estimate(settings, processes.count(settings), device.kind)
    if not device.is_here:
        say(
            "planned for a GPU in another machine; on this machine the run would "
            + ("not start" if settings.engine.device == "cuda" else "compute on the CPU")
            + f" ({missing_gpu()})"
        )
    rate = device.product_rate(settings) if speed is None else speed * 1e12
    memory = _memory(settings, processes, device)
    Console().print(render(found, memory, rate), highlight=False)
    if device.is_here and found.target <= _LARGEST_TIMED:
        _show_break_even(settings)


def _show_break_even(settings: "TrainSettings") -> None:
    """Print the tau that makes decoding faster, measured with an untrained drafter."""
    from jakiro.config import config_for
    from jakiro.drafter import JakiroDrafter
    from jakiro.errors import CheckpointError
    from jakiro.target.adapter import TargetAdapter
    from jakiro.target.record import record_target
    from jakiro.utils.logs import quiet_libraries
    from jakiro.utils.pretrained import choose_device, load_causal_lm
    from training.evaluation.break_even import break_even

    name, dtype = settings.target.name_or_path, settings.target.dtype
    device = choose_device(settings.engine.device)
    try:
        with quiet_libraries():
            model = load_causal_lm(name, dtype=dtype, device=device, local_files_only=True)
    except CheckpointError:  # a dry run needs only the target's config, and downloads no weights
        say("without the target's weights, the tau that makes decoding faster is not measured")
        return
    target = TargetAdapter(model)
    record = record_target(target.spec, name)
    found = break_even(target, JakiroDrafter(config_for(settings.drafter, record)))
    say(str(found))
    if found.warning is not None:
        say(f"warning: {found.warning}")


def _memory(settings: "TrainSettings", processes: "LaunchOptions", device: "PlannedDevice") -> int:
    if device.memory is not None:  # the memory of a device that may be in another machine
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
    if code not in (0, EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED):
        say(
            f"error: a process of the run failed or was killed (exit code {code}); remedy: see its "
            "output above; the same command resumes the run from its last checkpoint"
        )
    if code:
        raise typer.Exit(code)
    typer.echo(settings.run_folder.expanduser().absolute() / "drafter")


def _next_commands(settings: "TrainSettings") -> tuple[str, str]:
    """Return commands that use the finished drafter, and measure it."""
    from jakiro.utils.pretrained import local_tokenizer

    drafter = settings.run_folder.expanduser() / "drafter"
    tokenizer = local_tokenizer(settings.target.name_or_path)
    is_chat = tokenizer is not None and tokenizer.chat_template is not None
    use = ["chat", str(drafter)] if is_chat else ["generate", str(drafter), "TEXT"]
    prompts = settings.evaluation.prompts or "PROMPTS.jsonl"
    bench = ["jakiro", "bench", "--target", settings.target.name_or_path]
    bench += ["--method", "transformers", "--method", f"drafter={drafter}"]
    return (
        shlex.join(["jakiro", *use]),
        shlex.join([*bench, "--prompts", str(prompts)]),
    )


def _learn(
    settings: "TrainSettings",
    fractions: str,
    config: Path,
    overrides: list[str],
    processes: "LaunchOptions",
) -> None:
    from training.studies.learning_curve import LearningCurve

    curve = LearningCurve(settings, parse_fractions(fractions))
    for run in curve.runs:
        if not run.is_finished:
            say(f"learning curve: training on {run.fraction:g} of the documents")
        # Finished runs are passed as well: they are not trained again, but an error is raised if
        # their settings have changed.
        _run(run.settings, config, [*overrides, *run.overrides], processes)
    for line in curve.finish():
        typer.echo(line)
