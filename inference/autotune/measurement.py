"""Timing of a target's forward passes, and a store of measured times on this machine."""

import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import transformers
from platformdirs import user_cache_path

from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.step import chain_step
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.processor import instructions, processor
from jakiro.utils.settings import Settings

CONTEXT = 128  # number of tokens in the context during timing

KeyT = TypeVar("KeyT", bound=Hashable)
MeasuredT = TypeVar("MeasuredT", bound=Settings)


def kept(
    kind: type[MeasuredT],
    target: TargetAdapter,
    key: Sequence[object],
    measure: Callable[[], MeasuredT],
) -> MeasuredT:
    """Return what was measured before for a target and a key, or measure and store it.

    The sizes of trees for a given seed follow from the stored times, so that they stay the same.
    """
    name = fingerprint(kind.__name__, _facts(target), *key)[:16]
    path = user_cache_path("jakiro") / f"{kind.__name__.lower()}-{name}.json"
    with suppress(OSError, ValueError):
        return kind.model_validate_json(path.read_text())
    measured = measure()
    with suppress(OSError, ValueError):  # another process was faster
        return kind.model_validate_json(path.read_text())
    with suppress(OSError):  # the next process measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, measured.model_dump_json())
    return measured


def _facts(target: TargetAdapter) -> list[object]:
    """Return what the times of a target's steps depend on, ready for JSON."""
    device, modules = target.device, target.modules
    is_cuda = device.type == "cuda"
    machine = [torch.cuda.get_device_name(device)] if is_cuda else [processor(), *instructions()]
    machine += [platform.node(), torch.__version__, transformers.__version__]
    threads = [os.cpu_count(), torch.get_num_threads()]
    form = [str(target.dtype), target.is_compiled, modules.is_packed, modules.num_fused]
    adapters = [
        [name, *weight.shape] for name, weight in target.model.named_parameters() if "lora_" in name
    ]
    return [machine, threads, target.spec.fingerprint, form, modules.is_batch_invariant, adapters]


def shortest_seconds(
    works: Mapping[KeyT, Callable[[], object]], seconds: float
) -> dict[KeyT, float]:
    """Return the shortest time that each function takes; the functions take turns.

    Other work of the machine only lengthens the times. The functions must wait for their device.

    Args:
        seconds: duration after which no further turn starts.
    """
    times: dict[KeyT, list[float]] = {key: [] for key in works}
    end = time.perf_counter() + seconds
    with torch.inference_mode():
        while not all(times.values()) or time.perf_counter() < end:
            for key, work in works.items():
                started = time.perf_counter()
                work()
                times[key].append(time.perf_counter() - started)
    return {key: min(taken) for key, taken in times.items()}


def fill(target: TargetAdapter, cache: SlotCache, length: int) -> None:
    """Fill a cache with a context: the target reads its start, which is then copied."""
    start = min(length, CONTEXT)
    tokens = torch.zeros(1, start, dtype=torch.long, device=target.device)
    target.forward(chain_step(tokens, 0), cache)
    slots = torch.arange(start, length, device=target.device).expand(1, -1)
    cache.move(slots % start, slots)


def verifications(
    target: TargetAdapter, node_counts: Sequence[int]
) -> dict[int, Callable[[], object]]:
    """Return, for each number of nodes, a function that verifies a chain of this length."""
    longest = target.spec.max_position
    context = min(CONTEXT, longest // 2)
    # A target with few positions can verify only small trees.
    fitting = [count for count in node_counts if context + count < longest]
    most = max(fitting)
    cache = target.new_cache(1, context + most + 1)
    tokens = torch.zeros(1, context + most + 1, dtype=torch.long, device=target.device)
    with torch.inference_mode():
        fill(target, cache, context)

    def verify(count: int) -> object:
        parents = torch.arange(-1, count, device=target.device).expand(1, -1)
        step = chain_step(tokens[:, : count + 1], context)
        step = replace(step, parents=parents, max_depth=min(count + 1, 4))
        return target.logits(target.forward(step, cache).features).argmax(-1).tolist()

    return {count: partial(verify, count) for count in fitting}
