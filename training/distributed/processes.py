"""The processes of a run: those that DeepSpeed's launcher started, or only this process."""

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
    """The processes of a run, through which this process communicates with the others."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes all files of the run."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place."""
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
        """Raise an error in all processes if one of them fails, so that no process waits forever.

        Raises:
            JakiroError: another process failed; the message is that of the other process's error.
        """
        try:
            yield
        except Exception as error:
            # A message can be empty, for example that of a MemoryError.
            self.gather(str(error) or type(error).__name__)
            raise
        for message in self.gather(None):
            if message is not None:
                raise JakiroError(message)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def join_processes(device: Device) -> Iterator[Processes]:
    """Join the run's processes; leave them at the end, so that another run can start here."""
    deepspeed = import_deepspeed()
    was_joined = dist.is_initialized()
    own = choose_device(device)
    if own.type == "cuda":  # collectives over objects use the current device
        torch.cuda.set_device(own)
    deepspeed.init_distributed(verbose=False)
    num_threads = torch.get_num_threads()
    _share_cores()
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), own)
    finally:
        torch.set_num_threads(num_threads)
        if not was_joined:
            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed, without its log messages and without compiling any extension."""
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Without this entry, the first run on a CPU would spend more than a minute compiling an
    # extension. The entry is set before DeepSpeed checks what it could compile, because this check
    # also runs the compiler.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


def is_first_process() -> bool:
    """Return whether this process is the first one, even before the processes have been joined."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def launch_environment(device: Device) -> Iterator[None]:
    """Set the environment variables that DeepSpeed reads at start-up; restore them afterwards."""
    wanted = {"DS_ACCELERATOR": choose_device(device).type}
    if "RANK" not in os.environ:  # without RANK, DeepSpeed looks for MPI
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
    """Give each process on this machine its share of the cores, so that threads do not compete."""
    num_local = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if num_local > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_local))


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
