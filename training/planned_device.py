"""The device that a run is planned for: this machine's, or one of which only figures are given."""

import os
from dataclasses import dataclass

import torch

from jakiro.errors import ConfigError
from training.config import TrainSettings
from training.input_settings import TORCH_DTYPES
from training.processes import Kind, choose_device, missing_gpu
from training.speed import product_rate


@dataclass(frozen=True)
class PlannedDevice:
    """Each process's device.

    Attributes:
        kind: what it is.
        is_here: whether this machine has it.
        memory: bytes of it that are given; None for those of this machine's.
    """

    kind: Kind
    is_here: bool
    memory: int | None = None

    def memory_for(self, num_local: int) -> int:
        """Return the bytes of memory that a process has.

        Args:
            num_local: processes on a machine, which share its main memory.
        """
        if self.memory is not None:
            return self.memory
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(choose_device("cuda")).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local

    def product_rate(self, settings: TrainSettings) -> float | None:
        """Return floating-point operations per second of large products, if it can be measured."""
        if not self.is_here:
            return None
        return product_rate(choose_device(self.kind), TORCH_DTYPES[settings.target.dtype])


def present_device(settings: TrainSettings, memory: int | None = None) -> PlannedDevice:
    """Return the device that a run has on this machine.

    Args:
        settings: of the run.
        memory: bytes of it that may be used, if not all.

    Raises:
        ConfigError: a GPU is asked for where there is none.
    """
    kind: Kind = "cuda" if choose_device(settings.engine.device).type == "cuda" else "cpu"
    return PlannedDevice(kind, is_here=True, memory=memory)


def plan_device(settings: TrainSettings, memory: int | None = None) -> PlannedDevice:
    """Return the device that a run would have, here or elsewhere.

    Args:
        settings: of the run.
        memory: bytes of a device elsewhere; that is a GPU, unless `engine.device` is cpu.

    Raises:
        ConfigError: a GPU is asked for where there is none, and nothing is said of another one.
    """
    wanted = settings.engine.device
    if wanted == "cpu" or torch.cuda.is_available():
        return present_device(settings, memory)
    if wanted == "cuda" and memory is None:
        raise ConfigError(
            "engine.device is cuda, and there is no GPU that the run could be planned for",
            expected="a GPU that torch can use, or figures of one elsewhere",
            got=missing_gpu(),
            remedy="give --device-memory, and --device-speed for the time; or choose the device "
            "cpu or auto",
        )
    is_elsewhere = memory is not None
    return PlannedDevice("cuda" if is_elsewhere else "cpu", not is_elsewhere, memory)
