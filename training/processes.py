"""The processes of a run: communication, signals that end it, and failures of its machine.

The processes are those that DeepSpeed's launcher started, or only this process.
"""

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from jakiro.errors import JakiroError, ResourceError
from jakiro.utils.devices import Device, choose_device, is_out_of_memory
from jakiro.utils.logs import get_logger
from jakiro.utils.wording import summary_of

_logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, through which this process communicates with the others."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def gather(self, part: T) -> list[T]:
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
    here = choose_device(device)
    if here.type == "cuda":  # collectives over objects use the current device
        torch.cuda.set_device(here)
    deepspeed.init_distributed(verbose=False)
    num_threads = torch.get_num_threads()
    _share_cores()
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), here)
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
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


class Interruption:
    """Receives SIGINT (Ctrl-C) and SIGTERM.

    The first signal is only recorded, so that the run can save its state at the end of a step. A
    second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._is_requested = False

    @contextmanager
    def receive(self) -> Iterator[None]:
        """Receive signals within a `with` block, unless it is not in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._note}
        before = {number: signal.signal(number, act) for number, act in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_requested(self, *, waits: bool) -> bool:
        """Return whether any process received a signal; all processes get the same answer.

        Args:
            waits: whether the processes may wait for each other. If not, the answer is False for a
                run of several processes.
        """
        if self._processes.count > 1 and not waits:
            return False
        return any(self._processes.gather(self._is_requested))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_requested:
            raise KeyboardInterrupt
        if self._processes.is_first:
            _logger.warning(
                "the run will end after a complete step; press Ctrl-C again to end it at once"
            )
        self._note(number, frame)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_requested = True


@contextmanager
def explain_exhaustion() -> Iterator[None]:
    """Turn errors about a lack of memory into an error that names the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            "there is too little memory",
            got=summary_of(error),
            remedy="lower batch.micro_batch_size, objective.chunk_size or evaluation.num_prompts, "
            "set engine.activation_checkpointing=true, or raise engine.zero_stage; then start "
            "again, and the run resumes from its last checkpoint",
        ) from error


@contextmanager
def explain_lost_processes(last_step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn errors about a lost connection into an error that says that another process ended."""
    try:
        yield
    except RuntimeError as error:
        is_typed = isinstance(error, torch.distributed.DistError)
        if not (is_typed or re.search(r"Connection (closed|reset) by peer", str(error))):
            raise
        raise ResourceError(
            f"another process of this run ended after step {last_step()}",
            got=summary_of(error),
            remedy="see whether that process printed an error, or whether the system killed it, "
            "for example for lack of memory; the same command resumes the run from its last "
            "checkpoint",
        ) from error
