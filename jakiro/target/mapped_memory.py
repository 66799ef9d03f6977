"""Memory that shows an unchanged file, whose pages can be given back and are read again on use.

Weights that transformers loads from safetensors files without conversion are such memory.
"""

import ctypes
import mmap
import re
from pathlib import Path

from torch import Tensor

_DONTNEED = 4  # of Linux
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +/")  # a part that shows a file


class MappedMemory:
    """The parts of this process' memory that show files and were not written to so far.

    There are none on other systems than Linux.
    """

    def __init__(self) -> None:
        try:
            smaps = Path("/proc/self/smaps").read_text(errors="replace")
        except OSError:
            smaps = ""
        self._parts = _unchanged(smaps)

    def give_back(self, tensor: Tensor) -> None:
        """Give back the pages of a tensor, if they show a file; the tensor stays usable."""
        size = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // size) * size
        end = (tensor.data_ptr() + tensor.nbytes) // size * size
        if start < end and any(low <= start and end <= high for low, high in self._parts):
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED
            )


def _unchanged(smaps: str) -> list[tuple[int, int]]:
    """Return the first and last address of each part that shows a file and was not written to."""
    parts = re.split(r"^(?=[0-9a-f]+-)", smaps, flags=re.MULTILINE)
    found = []
    for part in parts:
        is_unchanged = all(re.search(f"^{key}: +0 kB", part, re.M) for key in ("Anonymous", "Swap"))
        if is_unchanged and (head := _HEAD.match(part)):
            found.append((int(head[1], 16), int(head[2], 16)))
    return found
