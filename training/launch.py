"""The start of a run's processes: the command for DeepSpeed's launcher, and its execution."""

import base64
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import Field

from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from training.config import TrainSettings

_logger = get_logger(__name__)

# A variable of processes whose launcher leads a session.
LAUNCHED = "JAKIRO_LAUNCHED"
_PR_SET_PDEATHSIG = 1  # of Linux
_LOCAL_LAUNCHER = "deepspeed.launcher.launch"  # DeepSpeed's launcher for a single machine


def end_with_parent() -> int:
    """Let the system kill this process as soon as its parent ends, and return the parent's id.

    If the parent ends before the system knows, this process ends at once. Only Linux does this. On
    other systems, the caller compares `os.getppid()` with the result from time to time.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended meanwhile, and there is no signal any more
            os.kill(os.getpid(), signal.SIGKILL)
    return parent


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

        from jakiro.utils.devices import choose_device

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
        from training.processes import import_deepspeed

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
    from training.processes import free_port

    program = ["--module", "training.train", "--config", str(config)]
    program += [word for override in overrides for word in ("--set", override)]
    program = [*processes.deepspeed, *program]
    if processes.hostfile is None and processes.nodes is None:
        hosts = {"localhost": _devices(processes.local(settings), settings)}
        world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
        words = [sys.executable, "-u", "-m", _LOCAL_LAUNCHER, "--quiet", "--world_info", world]
        return [*words, "--master_port", str(free_port()), *program]  # the default may be in use
    words = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if processes.hostfile is not None:
        words += ["--hostfile", str(processes.hostfile)]
    if processes.nodes is not None:
        words += ["--num_nodes", str(processes.nodes)]
    if processes.processes is not None or processes.hostfile is None:
        words += ["--num_accelerators", str(processes.local(settings))]
    return [*words, *program]


def _devices(count: int, settings: "TrainSettings") -> list[str]:
    """Return the devices of the processes on this machine."""
    from jakiro.utils.devices import choose_device

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or choose_device(settings.engine.device).type != "cuda":
        return [str(number) for number in range(count)]
    devices = visible.split(",")
    if len(devices) < count:
        raise ConfigError(
            "there are more processes than GPUs", expected=f"at most {len(devices)}", got=count
        )
    return devices[:count]


def launch(words: Sequence[str], settings: "TrainSettings") -> int:
    """Run a command from `command` and return its exit code.

    Requests to end (SIGINT, SIGTERM) are passed on to the processes of the run, which save their
    state; a second SIGINT kills those on this machine. DeepSpeed's launcher for a single machine
    does not receive them, because it would kill processes that are saving. If this process is
    killed, so are the others on this machine.
    """
    from jakiro.utils.devices import choose_device

    device = choose_device(settings.engine.device).type
    leads = {LAUNCHED: "1"} if _LOCAL_LAUNCHER in words else {}
    started = subprocess.Popen(
        words,
        env={**os.environ, "DS_ACCELERATOR": device, **leads},
        start_new_session=True,  # Ctrl-C reaches only this process
        preexec_fn=end_with_parent,
    )
    is_requested = False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal is_requested
        is_second = is_requested and number == signal.SIGINT
        if not is_requested:
            _logger.warning(
                "the run will end after a complete step, with several processes after the next "
                "one that is logged (log_every); press Ctrl-C again to end it at once"
            )
        is_requested = True
        _signal(started, signal.SIGKILL if is_second else signal.SIGTERM, words)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return EXIT_CODE_INTERRUPTED if code and is_requested else code


def _signal(started: subprocess.Popen[bytes], number: int, words: Sequence[str]) -> None:
    """Send a signal to the processes of a run on this machine; otherwise end the launcher."""
    import psutil

    is_local = _LOCAL_LAUNCHER in words
    workers = []
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(started.pid).children() if is_local else []
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
    if not workers:
        started.send_signal(number if is_local else signal.SIGINT)
