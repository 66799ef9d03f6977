"""The fastest number of threads for a target on a CPU, from steps that are timed at the start.

A small model is often fastest with a single thread, and a large model with all threads.
"""

from collections.abc import Callable
from typing import Literal

import torch

from inference.autotune.measurement import shortest_seconds, verifications
from inference.engine.threads import num_threads
from jakiro.target.adapter import TargetAdapter

TREE_NODES = 8  # number of nodes of the tree whose verification is timed
SECONDS = 0.5  # duration after which no further step is timed
# A number of threads with which steps take this many times as long as the shortest may still be the
# fastest in a loop other than this package's.
CLEARLY = 1.6

Threads = int | Literal["auto"] | None


def choose_threads(target: TargetAdapter, threads: Threads, *, drafts: bool) -> int | None:
    """Return the fastest number of threads; None for torch's current number.

    With a drafter, some steps verify a tree and others do not, so both must be fast.
    """
    if threads != "auto":
        return threads
    seconds = _seconds(target, drafts=drafts)
    return min(seconds, key=seconds.__getitem__)


def contending_threads(target: TargetAdapter, threads: Threads) -> list[int | None]:
    """Return the numbers of threads that may be the fastest in a loop without drafts."""
    if threads != "auto":
        return [threads]
    seconds = _seconds(target, drafts=False)
    return [each for each, taken in seconds.items() if taken <= CLEARLY * min(seconds.values())]


def other_threads(threads: int | None) -> list[int]:
    """Return the numbers of threads that may become faster when the load of the machine changes.

    On a busy machine, a single thread is often the fastest, and on a quiet one, all threads are.
    """
    most = torch.get_num_threads()
    if threads is None or most == 1:
        return []
    return [1] if threads > 1 else [most]


def _seconds(target: TargetAdapter, *, drafts: bool) -> dict[int | None, float]:
    """Return the expected seconds for each token with each number of threads.

    They are not kept, because they depend on what else the machine does.
    """
    most = torch.get_num_threads()
    numbers = sorted({1, max(1, most // 2), most})
    if target.device.type != "cpu" or len(numbers) == 1:
        return {None: 0.0}
    works: dict[tuple[int, int], Callable[[], object]] = {}
    for number in numbers:
        for count, step in verifications(target, (0, TREE_NODES) if drafts else (0,)).items():
            works[number, count] = num_threads(number)(step)
    taken = shortest_seconds(works, SECONDS)
    return {
        number: sum(seconds for (own, _), seconds in taken.items() if own == number)
        for number in numbers
    }
