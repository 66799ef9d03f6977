"""Timing of a target's forward passes, and a cache of measurements on this machine."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import torch
import transformers
from platformdirs import user_cache_path

from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.step import chain_step
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.processor import instructions, processor
from jakiro.utils.settings import Settings

CONTEXT = 128  # number of tokens in the context during timing
REFERENCE_SECONDS = 0.03  # duration of each check whether other processes slow this one down
QUIET = 1.3  # largest ratio of reference times at which a measurement is not provisional
PROVISIONAL_SECONDS = 600  # age up to which a provisional measurement is not repeated

# Variables that say how long idle threads of OpenMP wait in a loop before they sleep.
_WAITING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")

_logger = get_logger(__name__)
_in_this_process: dict[Path, Settings] = {}
_num_disturbed = 0

MeasuredT = TypeVar("MeasuredT", bound=Settings)


def cached(
    kind: type[MeasuredT],
    name: str,
    key: Sequence[object],
    measure: Callable[[], MeasuredT],
    folder: Path | None = None,
) -> MeasuredT:
    """Return a measurement from the cache, or measure and cache the result.

    A result that other processes may have slowed down is provisional: later processes use it for
    ten minutes, and as long as the machine is busy. After that, they measure again.
    """
    folder = folder or user_cache_path("jakiro")
    path = folder / f"{name}-{fingerprint(*key)[:16]}.json"
    provisional = path.with_suffix(".provisional.json")
    if (stored := _stored(kind, path)) is not None:
        return stored
    known = _in_this_process.get(path)
    if isinstance(known, kind):
        return known
    before = _reference()
    is_due = _is_quiet(before) and _age(provisional) > PROVISIONAL_SECONDS
    measured = None if is_due else _stored(kind, provisional)
    if measured is None:
        measured = measure()
        if _is_quiet(before, _reference()):
            _store(path, measured)
            with suppress(OSError):
                provisional.unlink()
        else:
            _store(provisional, measured)
            _note_disturbance()
    _in_this_process[path] = measured
    return measured


def num_disturbed() -> int:
    """Return the number of measurements of this process that other processes may have slowed."""
    return _num_disturbed


def _note_disturbance() -> None:
    """Count a disturbed measurement; only the first one is reported at once."""
    global _num_disturbed
    _num_disturbed += 1
    if _num_disturbed == 1:
        _logger.info(
            "other processes disturb the measurements, so the disturbed ones will be repeated later"
        )


def target_facts(target: TargetAdapter) -> list[object]:
    """Return the facts about machine and target on which times depend, ready for JSON."""
    device = target.device
    is_cuda = device.type == "cuda"
    kind = [torch.cuda.get_device_name(device)] if is_cuda else [processor(), *instructions()]
    versions = [torch.__version__, transformers.__version__]
    waiting = [os.environ.get(name) for name in _WAITING]
    threads = [os.cpu_count(), torch.get_num_threads(), *waiting]
    machine = [platform.node(), *kind, *threads, *versions]
    modules = target.modules
    form = [str(target.dtype), target.is_compiled, modules.form, modules.groups_heads]
    attention = getattr(target.config, "_attn_implementation", None)
    named = target.model.named_parameters()
    adapters = [[name, *part.shape] for name, part in named if "lora_" in name]
    return [machine, target.spec.fingerprint, form, attention, adapters]


def fill(target: TargetAdapter, cache: SlotCache, batch: int, length: int) -> None:
    """Fill a cache with a context: the target reads its start, which is then copied."""
    start = min(length, CONTEXT)
    tokens = torch.zeros(batch, start, dtype=torch.long, device=target.device)
    target.forward(chain_step(tokens, 0), cache)
    slots = torch.arange(start, length, device=target.device).expand(batch, -1)
    cache.move(slots % start, slots)


def verifications(
    target: TargetAdapter, node_counts: Sequence[int], batch: int = 1, context: int = CONTEXT
) -> dict[int, Callable[[], object]]:
    """Return, for each number of nodes, a function that verifies a chain of this length."""
    longest = target.spec.max_position
    context = min(context, longest // 2)
    # A target with few positions can verify only small trees.
    fitting = [count for count in node_counts if context + count < longest]
    most = max(fitting)
    cache = target.new_cache(batch, context + most + 1)
    tokens = torch.zeros(batch, context + most + 1, dtype=torch.long, device=target.device)
    with torch.inference_mode():
        fill(target, cache, batch, context)

    def verify(count: int) -> object:
        parents = torch.arange(-1, count, device=target.device).expand(batch, -1)
        step = chain_step(tokens[:, : count + 1], context)
        step = replace(step, parents=parents, max_depth=min(count + 1, 4))
        return target.logits(target.forward(step, cache).features).argmax(-1).tolist()

    return {count: partial(verify, count) for count in fitting}


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes; the function must wait for its device."""
    started = time.perf_counter()
    with torch.inference_mode():
        work()
    return time.perf_counter() - started


def _reference() -> tuple[float, float]:
    """Return the median and the mean seconds of a small matrix product on one core.

    Time slices of other processes raise the mean, but not the median.
    """
    x = torch.ones(48, 48)
    times: list[float] = []
    end = time.perf_counter() + REFERENCE_SECONDS
    while (started := time.perf_counter()) < end:
        torch.mm(x, x)
        times.append(time.perf_counter() - started)
    return median(times), fmean(times)


def _is_quiet(*references: tuple[float, float]) -> bool:
    values = [value for reference in references for value in reference]
    return max(values) <= QUIET * min(values)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return inf


def _stored(kind: type[MeasuredT], path: Path) -> MeasuredT | None:
    try:
        return kind.model_validate_json(path.read_text())
    except (OSError, ValueError):
        return None


def _store(path: Path, measured: Settings) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, measured.model_dump_json())
    except OSError:
        _logger.warning("cannot store measured times in %s; the next run will measure again", path)
