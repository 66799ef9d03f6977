"""The number of threads that decoding steps compute with on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Compute with a number of threads, and restore the previous number afterwards.

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
