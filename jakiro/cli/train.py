"""The command `jakiro train`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from pydantic import PositiveInt

from jakiro.cli import options
from jakiro.cli.output import say
from jakiro.errors import EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED
from jakiro.utils.extras import require_extra
from jakiro.utils.settings import Settings, load_settings
from training.launch import LaunchOptions, command, launch

if TYPE_CHECKING:
    from jakiro.utils.pretrained import Kind
    from training.config import TrainSettings

_GIB = 2**30


class PlanSettings(Settings):
    """Options."""

    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Number of sequences in a forward pass of a process; auto: as many as fit into memory."""
    dry_run: bool = False
    """Only estimate memory, disk space and time. No weights are downloaded, and data is tokenized
    only if epochs is set."""
    device_memory: float | None = None
    """Memory of the device to plan for, if that device is in another machine. On a machine without
    a GPU, a dry run with this option plans for a GPU unless engine.device is cpu."""
    device_speed: float | None = None
    """Speed of large matrix products on the device to plan for, if that device is in another
    machine."""


@options.with_options
def train(
    *,
    config: options.SettingsFile,
    overrides: options.Overrides = None,
    plan: PlanSettings,
    launched: LaunchOptions,
) -> None:
    """Train a drafter on one or several machines; the same command continues an interrupted run."""
    words = [*(overrides or ())]
    if plan.micro_batch_size not in (None, "auto"):
        words.append(f"batch.micro_batch_size={plan.micro_batch_size}")
    from training.config import TrainSettings

    settings = load_settings(TrainSettings, config, words)
    if not plan.dry_run:
        require_extra("train")
    from jakiro.utils.pretrained import choose_device
    from training.planning.estimate import choose_micro_batch, memory_here, planned_kind

    kind = planned_kind(settings, plan.device_memory)
    is_elsewhere = kind == "cuda" and choose_device("auto").type == "cpu"
    if is_elsewhere and launched.hostfile is None and launched.processes is None:
        launched = launched.model_copy(update={"processes": 1})
    count = launched.count(settings)
    memory = int((plan.device_memory or 0) * _GIB) or memory_here(kind, launched.local(settings))
    if plan.micro_batch_size == "auto":
        settings = choose_micro_batch(settings, count, memory, kind)
        size = settings.batch.micro_batch_size
        say(f"batch.micro_batch_size: {size}, which fits into memory")
        words.append(f"batch.micro_batch_size={size}")
    settings.batch.accumulation(count)  # rejects unsuitable sizes
    if plan.dry_run:
        _show_estimate(settings, count, kind, memory, plan.device_speed)
        return
    _run(settings, config, words, launched)
    for words_of_next in _next_commands(settings):
        say(f"next: {words_of_next}")


def _show_estimate(
    settings: "TrainSettings", processes: int, kind: "Kind", memory: int, speed: float | None
) -> None:
    from rich.console import Console

    from jakiro.utils.pretrained import choose_device
    from training.planning.estimate import estimate, product_rate, render

    run = estimate(settings, processes, kind)
    if speed is not None:
        rate: float | None = speed * 1e12
    else:
        is_here = kind == "cpu" or choose_device("auto").type == "cuda"
        rate = product_rate(settings) if is_here else None
    Console().print(render(run, memory, rate), highlight=False)


def _run(
    settings: "TrainSettings", config: Path, overrides: list[str], processes: LaunchOptions
) -> None:
    if processes.count(settings) == 1 and processes.hostfile is None and not processes.deepspeed:
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
