"""The devices of this machine: what they compute in hardware, their memory, constants on them."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.errors import ConfigError, ResourceError

Device = Literal["auto", "cpu", "cuda"]
Kind = Literal["cpu", "cuda"]

_MOST_CONSTANTS = 512  # the one that was used least recently is freed first
_BFLOAT16_CHECKS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
# Messages of torch, depending on the system.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


def choose_device(device: Device) -> torch.device:
    """Return this process's device; "auto" prefers a GPU."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        build = "" if torch.version.cuda else ", which was built without CUDA"
        raise ConfigError(
            "there is no GPU that torch can use",
            got=f"torch {torch.__version__}{build}, with CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}",
            remedy="choose the device cpu or auto",
        )
    if device == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor multiplies matrices in bfloat16 without converting them first.

    Only processors of the x86 family are recognized.
    """
    return any(getattr(torch.cpu, check, bool)() for check in _BFLOAT16_CHECKS)


def native_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if a device multiplies matrices in this dtype in hardware, else float32.

    Args:
        device: a processor or a GPU; other kinds of devices are taken to compute in float32.
    """
    if device.type == "cuda":
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_native = device.type == "cpu" and computes_bfloat16()
    return torch.bfloat16 if is_native else torch.float32


def default_dtype() -> torch.dtype:
    """Return bfloat16 if this machine supports it in hardware, and float32 otherwise."""
    return native_dtype(choose_device("auto"))


def instructions() -> list[object]:
    """Return facts about the processor's instructions, as virtual machines may hide its name."""
    return [torch.backends.cpu.get_cpu_capability(), computes_bfloat16()]


def processor() -> str:
    """Return the name of this machine's processor."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        names = [line for line in facts.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory, on a GPU or in main memory."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(f"DefaultCPUAllocator: {text}" in str(error) for text in _OUT_OF_MEMORY)


def too_little_memory(what: str, error: BaseException) -> ResourceError:
    """Return an error which says that a model does not fit into memory."""
    lines = str(error).strip().splitlines()
    return ResourceError(
        f"there is too little memory to load {what}",
        got=lines[0] if lines else "a failed allocation",
        remedy="use a smaller model or dtype, such as bfloat16, or free memory",
    )


def indices_on(device: torch.device, indices: Sequence[int]) -> Int[Tensor, " n"]:
    """Return indices on a device; the tensor must not be changed."""
    return constants_on(device, tuple(indices), torch.long)


@lru_cache(maxsize=_MOST_CONSTANTS)
def constants_on(
    device: torch.device, values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """Return numbers on a device, with shape [n]; the tensor must not be changed.

    They are copied to the device once, and used in many decoding steps.
    """
    with torch.inference_mode(False):  # the tensor may be used outside this mode
        return torch.tensor(values, dtype=dtype, device=device)


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Compute with a number of threads on a CPU, and restore the previous number afterwards.

    If another thread of the process uses torch for the first time inside the block, it starts with
    this number of threads, and keeps it afterwards.
    """
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
