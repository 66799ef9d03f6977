"""DeepSpeed's launcher: the command that starts the processes of a run, and waiting for it."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from jakiro.errors import ConfigError
from jakiro.utils.pretrained import choose_device
from training.config import TrainSettings
from training.distributed.processes import free_port, import_deepspeed


@dataclass(frozen=True)
class Processes:
    """Which processes take part.

    Attributes:
        per_node: on every machine; None for one per GPU, or a single one without GPUs.
        hostfile: machines, one per line as `NAME slots=NUMBER`; None for this one alone.
        nodes: how many of its machines, from the first on; None for all.
        launcher: what starts processes on other machines, such as pdsh or slurm; None for
            DeepSpeed's default.
        options: further words for DeepSpeed's launcher, as they are.
    """

    per_node: int | None = None
    hostfile: Path | None = None
    nodes: int | None = None
    launcher: str | None = None
    options: tuple[str, ...] = ()

    def local(self, settings: TrainSettings) -> int:
        """Return the number of processes on each machine.

        Raises:
            ConfigError: it cannot be.
        """
        if self.per_node is not None and self.per_node < 1:
            raise ConfigError(
                "there is no process", expected="--processes from 1", got=self.per_node
            )
        if self.per_node is not None:
            return self.per_node
        is_gpu = choose_device(settings.engine.device).type == "cuda"
        return torch.cuda.device_count() if is_gpu else 1

    def count(self, settings: TrainSettings) -> int:
        """Return the number of processes on all machines.

        Raises:
            ConfigError: the hostfile cannot be read, or has too few machines.
        """
        if self.hostfile is None:
            return self.local(settings) * (self.nodes or 1)
        slots = self._slots(self.hostfile)
        if self.per_node is not None:
            slots = [min(self.per_node, one) for one in slots]
        return sum(slots)

    def _slots(self, hostfile: Path) -> list[int]:
        import_deepspeed()
        from deepspeed.launcher.runner import fetch_hostfile

        try:
            hosts = fetch_hostfile(str(hostfile))
        except ValueError as error:
            raise ConfigError(f"cannot read the hostfile {hostfile}", got=error) from error
        slots = list((hosts or {}).values())[: self.nodes]
        if not slots or len(slots) < (self.nodes or 1):
            raise ConfigError(
                f"the hostfile {hostfile} names too few machines",
                expected=f"{self.nodes or 1} or more lines NAME slots=NUMBER",
                got=len(slots),
            )
        return slots


def command(
    settings: TrainSettings, config: Path, overrides: Sequence[str], processes: Processes
) -> list[str]:
    """Return the command that starts a run's processes.

    Args:
        settings: of the run.
        config: the file that they are read from, by every process.
        overrides: laid over it.
        processes: which take part.

    Raises:
        ConfigError: there is no such number of processes.
    """
    words = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if processes.hostfile is not None:
        words += ["--hostfile", str(processes.hostfile)]
    if processes.nodes is not None:
        words += ["--num_nodes", str(processes.nodes)]
    if processes.launcher is not None:
        words += ["--launcher", processes.launcher]
    if processes.hostfile is None and processes.nodes is None:  # several may share this machine
        words += ["--master_port", str(free_port())]
    if processes.per_node is not None or processes.hostfile is None:
        words += ["--num_accelerators", str(processes.local(settings))]
    program = ["--module", "training.train", "--config", str(config)]
    laid_over = [word for override in overrides for word in ("--set", override)]
    return [*words, *processes.options, *program, *laid_over]


def launch(words: Sequence[str], settings: TrainSettings) -> int:
    """Run a command from `command` and return its exit code.

    An interruption reaches it, too: it is given the time to end its processes. So does a request to
    terminate, which the launcher would not pass on to them.
    """
    device = choose_device(settings.engine.device).type
    started = subprocess.Popen(words, env=os.environ | {"DS_ACCELERATOR": device})
    before = signal.signal(signal.SIGTERM, lambda *_: started.send_signal(signal.SIGINT))
    try:
        while True:
            try:
                return started.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)
