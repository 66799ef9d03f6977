"""The number of threads that decoding steps compute with on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Compute with a number of threads, and restore the process's own number afterwards.

    Args:
        count: number of threads for the operators of torch; None to leave the number as it is.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
