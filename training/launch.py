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
    """Processes of a run on this machine."""

    processes: int | None = Field(None, ge=1)
    """Number of processes; by default one per GPU, or one if there are no GPUs."""

    def count(self, settings: "TrainSettings") -> int:
        if self.processes is not None:
            return self.processes
        import torch

        from jakiro.utils.devices import choose_device

        is_gpu = choose_device(settings.engine.device).type == "cuda"
        return torch.cuda.device_count() if is_gpu else 1


def command(
    settings: "TrainSettings", config: Path, overrides: Sequence[str], processes: LaunchOptions
) -> list[str]:
    """Return the command that starts a run's processes, each of which reads the settings."""
    from training.processes import free_port

    hosts = {"localhost": _devices(processes.count(settings), settings)}
    world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--quiet"),
        *("--world_info", world, "--master_port", str(free_port())),  # the default may be in use
        *("--module", "training.train", "--config", str(config)),
        *(word for override in overrides for word in ("--set", override)),
    ]


def _devices(count: int, settings: "TrainSettings") -> list[str]:
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
    state; a second SIGINT kills them. DeepSpeed's launcher does not receive them, because it would
    kill processes that are saving. If this process is killed, so are the others.
    """
    from jakiro.utils.devices import choose_device

    device = choose_device(settings.engine.device).type
    started = subprocess.Popen(
        words,
        env={**os.environ, "DS_ACCELERATOR": device, LAUNCHED: "1"},
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
        _signal(started, signal.SIGKILL if is_second else signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return EXIT_CODE_INTERRUPTED if code and is_requested else code


def _signal(started: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the processes of a run; to the launcher if it has not started them yet."""
    import psutil

    workers = []
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(started.pid).children()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
    if not workers:
        started.send_signal(number)
