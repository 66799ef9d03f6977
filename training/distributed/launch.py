"""The start of a run's processes: the command for DeepSpeed's launcher, and its execution."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from training.config import TrainSettings


class LaunchOptions(Settings):
    """Processes and machines of a run."""

    processes: int | None = Field(None, ge=1)
    """Number of processes per machine; by default one per GPU, or one if there are no GPUs."""
    hostfile: Path | None = None
    """File that lists machines with a shared file system, each on a line of the form NAME
    slots=NUMBER; by default only this machine."""
    nodes: int | None = Field(None, ge=1)
    """Number of machines to use, in the order of the hostfile; by default all."""
    deepspeed: tuple[str, ...] = ()
    """Further argument for DeepSpeed's launcher."""

    def local(self, settings: "TrainSettings") -> int:
        """Return the number of processes on each machine."""
        if self.processes is not None:
            return self.processes
        import torch

        from jakiro.utils.pretrained import choose_device

        is_gpu = choose_device(settings.engine.device).type == "cuda"
        return torch.cuda.device_count() if is_gpu else 1

    def count(self, settings: "TrainSettings") -> int:
        """Return the total number of processes on all machines.

        Raises:
            ConfigError: the hostfile cannot be read or lists too few machines.
        """
        if self.hostfile is None:
            return self.local(settings) * (self.nodes or 1)
        slots = self._slots(self.hostfile)
        if self.processes is not None:
            slots = [min(self.processes, count) for count in slots]
        return sum(slots)

    def _slots(self, hostfile: Path) -> list[int]:
        from training.distributed.processes import import_deepspeed

        import_deepspeed()
        from deepspeed.launcher.runner import fetch_hostfile

        try:
            hosts = fetch_hostfile(str(hostfile))
        except ValueError as error:
            raise ConfigError(f"cannot read the hostfile {hostfile}", got=error) from error
        slots = list((hosts or {}).values())[: self.nodes]
        if not slots or len(slots) < (self.nodes or 1):
            raise ConfigError(
                f"the hostfile {hostfile} lists too few machines",
                expected=f"{self.nodes or 1} or more lines of the form NAME slots=NUMBER",
                got=len(slots),
            )
        return slots


def command(
    settings: "TrainSettings", config: Path, overrides: Sequence[str], processes: LaunchOptions
) -> list[str]:
    """Return the command that starts a run's processes.

    Every process reads the file of settings.
    """
    from training.distributed.processes import free_port

    words = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if processes.hostfile is not None:
        words += ["--hostfile", str(processes.hostfile)]
    if processes.nodes is not None:
        words += ["--num_nodes", str(processes.nodes)]
    if processes.hostfile is None and processes.nodes is None:  # the default port may be in use
        words += ["--master_port", str(free_port())]
    if processes.processes is not None or processes.hostfile is None:
        words += ["--num_accelerators", str(processes.local(settings))]
    program = ["--module", "training.train", "--config", str(config)]
    replaced = [word for override in overrides for word in ("--set", override)]
    return [*words, *processes.deepspeed, *program, *replaced]


def launch(words: Sequence[str], settings: "TrainSettings") -> int:
    """Run a command from `command` and return its exit code.

    An interruption (SIGINT) reaches the launcher as well as this process. This function then waits
    until the launcher has ended the processes of the run. A request to terminate (SIGTERM) is
    passed on to the launcher as an interruption, because the launcher would not pass SIGTERM on to
    the processes of the run.
    """
    from jakiro.utils.pretrained import choose_device

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
