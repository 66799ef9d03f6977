"""The processes of a run: started by DeepSpeed's launcher, or this one alone."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from jakiro.errors import JakiroError
from jakiro.utils.pretrained import Device, choose_device

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        rank: number of this process.
        count: number of processes.
        device: where this process computes.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run leaves behind."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up the values of all processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def gather(self, part: T) -> list[T]:
        """Return the parts of all processes, in the order of their ranks."""
        parts = [part] * self.count
        if self.count > 1:
            dist.all_gather_object(parts, part)
        return parts

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what stops one process inside stop all of them: none may wait for it forever.

        Raises:
            JakiroError: another process was stopped; it says by what.
        """
        try:
            yield
        except Exception as error:
            self.gather(str(error))
            raise
        for message in self.gather(""):
            if message:
                raise JakiroError(message)

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def join_processes(device: Device) -> Iterator[Processes]:
    """Join the run's other processes, and leave nothing behind that hinders another run.

    Args:
        device: where to compute; "auto" prefers a GPU.
    """
    deepspeed = import_deepspeed()
    was_joined = dist.is_initialized()
    deepspeed.init_distributed(verbose=False)
    num_threads = torch.get_num_threads()
    _share_cores()
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), choose_device(device))
    finally:
        torch.set_num_threads(num_threads)
        if not was_joined:
            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed, which takes seconds, without its remarks and without compiling anything."""
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Else the first run on a CPU compiles an extension for more than a minute. Set before DeepSpeed
    # looks for itself what it could compile, which runs the compiler too.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


def is_first_process() -> bool:
    """Whether this is the first process, also before it has joined the others."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def launch_environment(device: Device) -> Iterator[None]:
    """Set what DeepSpeed reads when it is imported and joined; restore it afterwards.

    Args:
        device: where to compute; "auto" prefers a GPU.
    """
    wanted = {"DS_ACCELERATOR": choose_device(device).type}
    if "RANK" not in os.environ:  # else it looks for MPI
        wanted |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _share_cores() -> None:
    """Give each process of this machine its share of the cores; threads that compete crawl."""
    num_local = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if num_local > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_local))


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
