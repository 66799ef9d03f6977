"""Training in real processes, forked from a process with all imports so that they start fast.

The processes join each other as under a launcher, can be killed, and can have a limit on the size
of their files.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import sleep

from jakiro.utils.settings import dump_settings
from training.config import TrainSettings
from training.processes import free_port
from training.train import main

FORKING = get_context("forkserver")
FORKING.set_forkserver_preload(["deepspeed", "training.loop.run", "training.train"])
_SECONDS = 300.0


@dataclass
class Trainee:
    """A process that trains, and the file with its output."""

    process: BaseProcess
    output: Path

    def end(self) -> int:
        """Wait for the process to end and return its exit code, negative if it was killed."""
        self.process.join(_SECONDS)
        assert self.process.exitcode is not None, f"the process hangs: {self.errors}"
        return self.process.exitcode

    @property
    def errors(self) -> str:
        """Everything that the process has printed, to stdout and stderr."""
        return self.output.read_text()

    def kill_when(self, is_time: Callable[[], bool]) -> bool:
        """Send SIGKILL as soon as `is_time()` is true; return False if the process ended first."""
        return self.signal_when(is_time, signal.SIGKILL) and self.end() == -signal.SIGKILL

    def signal_when(self, is_time: Callable[[], bool], number: int) -> bool:
        """Send a signal as soon as `is_time()` is true; return False if the process ended first."""
        while self.process.is_alive():
            if is_time():
                assert self.process.pid is not None
                os.kill(self.process.pid, number)
                return True
            sleep(0.001)
        return False


def start_training(
    settings: TrainSettings,
    workshop: Path,
    *,
    num_processes: int = 1,
    file_limit: int | None = None,
) -> list[Trainee]:
    """Start the processes of a run, and return them in the order of their ranks."""
    config = workshop / "processes.yaml"
    config.write_text(dump_settings(settings))
    # The fork server, which starts with the first process, imports DeepSpeed with this variable.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    port = str(free_port())
    trainees = []
    for rank in range(num_processes):
        output = workshop / f"output-{rank}.txt"
        environment = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"},
        }
        process = FORKING.Process(target=_run, args=(config, environment, output, file_limit))
        process.start()
        trainees.append(Trainee(process, output))
    return trainees


def train_in_processes(settings: TrainSettings, workshop: Path, num_processes: int = 1) -> None:
    """Train to the end in `num_processes` processes."""
    for trainee in start_training(settings, workshop, num_processes=num_processes):
        assert trainee.end() == 0, trainee.errors


def _run(config: Path, environment: dict[str, str], output: Path, file_limit: int | None) -> None:
    os.environ.update(environment)
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    sys.exit(main(["--config", str(config)]))
