"""Real processes that train, forked from one that has imported everything, so that they start fast.

They meet as those of a launcher do, may be killed, and may be refused large files.
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
from training.distributed.processes import free_port
from training.train import main

FORKING = get_context("forkserver")
FORKING.set_forkserver_preload(["deepspeed", "training.loop.run", "training.train"])
_SECONDS = 300.0


@dataclass
class Trainee:
    """A process that trains, and the file that takes what it prints."""

    process: BaseProcess
    output: Path

    def end(self) -> int:
        """Wait for its end and return its exit code; that of a killed one is negative."""
        self.process.join(_SECONDS)
        assert self.process.exitcode is not None, f"it hangs: {self.errors}"
        return self.process.exitcode

    @property
    def errors(self) -> str:
        """All that it printed."""
        return self.output.read_text()

    def kill_when(self, is_time: Callable[[], bool]) -> bool:
        """Send it SIGKILL as soon as it is time; return False if it came to its end before."""
        while self.process.is_alive():
            if is_time():
                assert self.process.pid is not None
                os.kill(self.process.pid, signal.SIGKILL)
                return self.end() == -signal.SIGKILL
            sleep(0.001)
        return False


def start_training(
    settings: TrainSettings,
    workshop: Path,
    *,
    num_processes: int = 1,
    file_limit: int | None = None,
) -> list[Trainee]:
    """Start the processes of a run, of which the first one writes.

    Args:
        settings: of the run.
        workshop: takes a config and what the processes print.
        num_processes: how many.
        file_limit: bytes that a file may have.
    """
    config = workshop / "processes.yaml"
    config.write_text(dump_settings(settings))
    # The one that forks starts with the first process, and reads this when it imports DeepSpeed.
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
    """Train to the end in so many processes."""
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
