"""Errors about too little memory, which torch, Python and CUDA report in different ways."""

import torch

from jakiro.errors import ResourceError

_MESSAGES = ("can't allocate memory", "not enough memory")  # of torch, depending on the system


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory, on a GPU or in main memory."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(f"DefaultCPUAllocator: {text}" in str(error) for text in _MESSAGES)


def too_little_memory(what: str, error: BaseException) -> ResourceError:
    """Return an error which says that a model does not fit into memory."""
    lines = str(error).strip().splitlines()
    return ResourceError(
        f"there is too little memory to load {what}",
        got=lines[0] if lines else "a failed allocation",
        remedy="use a smaller model or dtype, such as bfloat16, or free memory",
    )
