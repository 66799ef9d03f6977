"""The fastest number of threads and layout of weights for a target on a CPU, found by measurement.

A small model is often fastest with a single thread, and a large model with all threads. With
reordered weights (`jakiro.target.packed_linear`), the verification of a tree usually takes less
time, but a single token may take more. Both are therefore chosen together, by measurement.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple

import psutil
import torch

from inference.autotune.measurement import cached, seconds_of, target_facts, verifications
from inference.engine.threads import num_threads
from jakiro.target.adapter import TargetAdapter
from jakiro.target.packed_linear import can_pack, form_name, packed_bytes
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

TREE_NODES = 8  # number of nodes of the tree whose verification is timed
TREE_TAU = 2.0  # mean acceptance length that is assumed for such trees in the choice
REPEATS = 4  # smallest number of repetitions, of which the first is a warm-up
MOST_REPEATS = 10
SECONDS = 3.0  # duration after which a measurement with enough repetitions ends
# A way to compute that takes this many times as long as the fastest, for a single token and for a
# tree, is not timed again.
CLEARLY = 1.6
# Reordered weights take as much memory as the target's own, so they must be this much faster.
REORDERED_GAIN = 1.05
MEMORY_SHARE = 0.5  # largest share of the available memory that reordered weights may take

Threads = int | Literal["auto"] | None
Packed = bool | Literal["auto"]

_logger = get_logger(__name__)


class Compute(Settings, frozen=True):
    """A way to compute on a CPU.

    Attributes:
        pack_single: whether forward passes over a single token use reordered weights, too.
    """

    threads: int | None = None
    packed: bool = False
    pack_single: bool = False

    @property
    def is_for_trees(self) -> bool:
        """Whether weights are reordered, and a single token is still computed as without that."""
        return self.packed and not self.pack_single

    def prepare(self, target: TargetAdapter) -> None:
        """Make the target compute with reordered weights or with its own weights."""
        if self.packed:
            target.modules.pack(single=self.pack_single)
        else:
            target.modules.unpack()

    def __str__(self) -> str:
        form = form_name(self.packed, self.pack_single)
        if self.threads is None:
            return form
        return f"{self.threads} thread{'s' if self.threads > 1 else ''}, {form}"


class ComputeSeconds(Settings):
    """The measured seconds of the target's forward passes in one way to compute."""

    compute: Compute
    token: float
    tree: float

    def rate(self, *, drafts: bool) -> float:
        """Return the expected number of tokens per second.

        With a drafter, some steps have a tree and others do not, so both must be fast.
        """
        return (1 + TREE_TAU) / (self.token + self.tree) if drafts else 1 / self.token


class ComputeGrid(Settings):
    """The measured seconds of all ways to compute that were tried."""

    ways: tuple[ComputeSeconds, ...]

    def best(self, *, drafts: bool) -> Compute:
        """Return the way to compute that is expected to be fastest.

        Reordered weights need more memory, so if the target's own weights were measured, too, they
        are used only if they are faster by `REORDERED_GAIN`. Without trees, weights that are
        reordered for trees alone are then as good as the target's own.
        """

        def rate(way: ComputeSeconds) -> float:
            return way.rate(drafts=drafts)

        own = max((way for way in self.ways if not way.compute.packed), key=rate, default=None)
        if own is None:
            return max(self.ways, key=rate).compute
        ways = [way for way in self.ways if drafts or not way.compute.is_for_trees]
        fastest = max(ways, key=rate)
        return (fastest if rate(fastest) > REORDERED_GAIN * rate(own) else own).compute

    def contenders(self, *, drafts: bool) -> list[Compute]:
        """Return the ways to compute that are not clearly slower than the best."""
        least = max(way.rate(drafts=drafts) for way in self.ways) / CLEARLY
        return [way.compute for way in self.ways if way.rate(drafts=drafts) >= least]


def choose_compute(
    target: TargetAdapter,
    threads: Threads = "auto",
    packed: Packed = "auto",
    *,
    drafts: bool = True,
) -> Compute:
    """Return the fastest way to compute, measured unless arguments or device leave no choice."""
    ways = list(possible_ways(target, threads, packed))
    return ways[0] if len(ways) == 1 else _known_grid(target, ways).best(drafts=drafts)


def contenders(
    target: TargetAdapter, threads: Threads, packed: Packed, *, drafts: bool
) -> list[Compute]:
    """Return the ways to compute that may be the fastest in a loop other than this package's."""
    ways = list(possible_ways(target, threads, packed))
    return ways if len(ways) == 1 else _known_grid(target, ways).contenders(drafts=drafts)


def _known_grid(target: TargetAdapter, ways: Sequence[Compute]) -> ComputeGrid:
    key = [*target_facts(target), [str(way) for way in ways]]
    return cached(ComputeGrid, "compute", key, lambda: measure_grid(target, ways))


def measure_grid(target: TargetAdapter, ways: Sequence[Compute]) -> ComputeGrid:
    """Measure the ways to compute in turn; afterwards, the target's own weights are in use."""
    _logger.info("measuring the fastest number of threads and layout of weights")
    trials = [_Trial.start(way, target) for way in ways]
    end = time.perf_counter() + SECONDS
    for repeat in range(MOST_REPEATS):
        if repeat >= REPEATS and time.perf_counter() > end:
            break
        for trial in trials if repeat < 2 else _promising(trials):
            trial.measure()
    return ComputeGrid(ways=tuple(trial.result() for trial in trials))


class _Trial(NamedTuple):
    """The measurements of a way to compute, by number of nodes."""

    compute: Compute
    steps: dict[int, Callable[[], object]]
    seconds: dict[int, list[float]]

    @classmethod
    def start(cls, compute: Compute, target: TargetAdapter) -> "_Trial":
        own = target.with_own_choice()
        compute.prepare(own)
        steps = verifications(own, (0, TREE_NODES))
        return cls(compute, steps, {count: [] for count in steps})

    def measure(self) -> None:
        with num_threads(self.compute.threads):
            for count, step in self.steps.items():
                self.seconds[count].append(seconds_of(step))

    def result(self) -> ComputeSeconds:
        # The tree may have fewer than `TREE_NODES` nodes, because it must fit into the context.
        token, tree = (median(self.seconds[count][1:]) for count in (0, max(self.seconds)))
        return ComputeSeconds(compute=self.compute, token=token, tree=tree)


def _promising(trials: Sequence[_Trial]) -> list[_Trial]:
    """Return the trials that are not clearly slower both for a single token and for a tree."""
    results = [trial.result() for trial in trials]
    token = min(result.token for result in results)
    tree = min(result.tree for result in results)
    return [
        trial
        for trial, result in zip(trials, results, strict=True)
        if result.token < CLEARLY * token or result.tree < CLEARLY * tree
    ]


def possible_ways(target: TargetAdapter, threads: Threads, packed: Packed) -> Iterator[Compute]:
    """Yield the ways to compute that the arguments and the machine allow."""
    if target.device.type != "cpu":
        yield Compute(packed=packed is True)
        return
    most = torch.get_num_threads()
    for count in sorted({1, max(1, most // 2), most}) if threads == "auto" else (threads,):
        if packed is not True:
            yield Compute(threads=count)
        if packed is True or (packed == "auto" and _may_pack(target)):
            yield Compute(threads=count, packed=True)
            yield Compute(threads=count, packed=True, pack_single=True)


def other_threads(threads: int | None) -> list[int]:
    """Return the numbers of threads that may become faster when the load of the machine changes.

    On a busy machine, a single thread is often the fastest, and on a quiet one, all threads are.
    """
    most = torch.get_num_threads()
    if threads is None or most == 1:
        return []
    return [1] if threads > 1 else [most]


def _may_pack(target: TargetAdapter) -> bool:
    if target.is_compiled or not can_pack(target.model):
        return False
    return packed_bytes(target.model) <= MEMORY_SHARE * psutil.virtual_memory().available
