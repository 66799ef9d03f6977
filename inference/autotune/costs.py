"""Seconds of verification and drafting on this machine: timed at the start, and stored."""

import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import transformers
from platformdirs import user_cache_path
from transformers import LogitsProcessorList

from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.context import Context
from inference.protocol import Budget, CostAware, Drafter
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.step import chain_step
from jakiro.utils.devices import instructions, processor
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.settings import Settings

CONTEXT = 128  # number of tokens in the context during timing
NODE_COUNTS = (0, 8, 24, 48)  # numbers of nodes for which verification is timed
# The same for a target that reads accepted tokens again with each chain, and the usual number of
# these tokens. Without drafts, it reads none.
REPLAY_COUNTS, REPLAYED = (0, 1, 8, 24, 48), 4
BATCH_NODE_COUNTS = (1, 2, 3, 4, 6, 12, 16)  # between which costs of batches are interpolated, too
FEWEST_PASSES = 3  # drafting is timed with 1, 2, ... passes, up to at least this number
SECONDS = 0.5  # duration after which no further step is timed

KeyT = TypeVar("KeyT", bound=Hashable)


class Costs(Settings):
    """Seconds that verification and drafting take on this machine."""

    # seconds of a target forward pass over root and nodes, including logits, by number of nodes
    verify: dict[int, float]
    draft: dict[int, float]  # seconds of drafting in a decoding step, by number of trunk passes
    read: float = 0.0  # seconds in which the drafter reads one token of a context

    def verify_seconds(self, num_nodes: float) -> float:
        """Return the seconds to verify `num_nodes` nodes, interpolated between measured numbers.

        Above the largest measured number, the line through the last two measured numbers goes on,
        unless it falls.
        """
        counts = sorted(self.verify)
        seconds = [self.verify[count] for count in counts]
        beyond, slope = max(0.0, num_nodes - counts[-1]), 0.0
        if len(counts) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]))
        return float(np.interp(num_nodes, counts, seconds)) + slope * beyond

    def of_batch(self, batch: int) -> "Costs":
        """Return the expected costs of steps over several sequences.

        A step takes as long as a step of one sequence over as many tokens; drafting is assumed to
        grow with the number of sequences as a verification of eight nodes does.
        """

        def of_each(num_nodes: int) -> float:
            return self.verify_seconds(batch * (num_nodes + 1) - 1)

        growth = of_each(8) / self.verify_seconds(8)
        return Costs(
            verify={count: of_each(count) for count in {*self.verify, *BATCH_NODE_COUNTS}},
            draft={passes: growth * seconds for passes, seconds in self.draft.items()},
            read=self.read,
        )


def costs_with(target: TargetAdapter, drafter: Drafter | None) -> Costs:
    """Return the seconds of verification and drafting, which are measured in about a second.

    Only the passes of models take time: those of trained drafters and of small language models. The
    drafting of all other drafters costs nothing.
    """
    slow = drafter.slow_part if isinstance(drafter, CostAware) else drafter
    key: list[object] = []
    if isinstance(slow, TrainedDrafter):
        key = [slow.model.config.settings.model_dump(mode="json"), slow.forms]
    elif isinstance(slow, SmallLMDrafter):
        key = [slow.model.spec.fingerprint, slow.settings.model_dump(mode="json")]
    else:
        slow = None
    return _kept(target, key, lambda: _measured(target, slow))


def _kept(target: TargetAdapter, key: Sequence[object], measure: Callable[[], Costs]) -> Costs:
    """Return the costs that were measured before for a target and a key, or measure and store them.

    The sizes of trees for a given seed follow from the stored times, so that they stay the same.
    """
    name = fingerprint("Costs", _facts(target), *key)[:16]
    path = user_cache_path("jakiro") / f"costs-{name}.json"
    with suppress(OSError, ValueError):
        return Costs.model_validate_json(path.read_text())
    measured = measure()
    with suppress(OSError, ValueError):  # another process was faster
        return Costs.model_validate_json(path.read_text())
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


def _measured(target: TargetAdapter, drafter: TrainedDrafter | SmallLMDrafter | None) -> Costs:
    counts = REPLAY_COUNTS if target.spec.replays else NODE_COUNTS
    works: dict[tuple[str, int], Callable[[], object]] = {
        ("verify", count): step for count, step in verifications(target, counts).items()
    }
    length = min(CONTEXT, target.spec.max_position // 2)
    if drafter is not None:
        works |= _draftings(target, drafter, length)
    seconds = shortest_seconds(works, SECONDS)
    draft = {number: taken for (kind, number), taken in seconds.items() if kind == "draft"}
    reading = seconds.get(("read", 1), 0.0) - draft.get(1, 0.0)
    return Costs(
        verify={number: taken for (kind, number), taken in seconds.items() if kind == "verify"},
        draft=draft,
        read=max(0.0, reading) / length,
    )


def timed_passes(model: JakiroDrafter) -> int:
    """Return the largest number of trunk passes to time, which is at least that of training.

    A drafter with `parallel_heads: transfer` has only one pass, because its first pass does not
    return what a second one would have to read. Nor has a block, whose levels come from one pass.
    """
    schedule = model.config.settings.schedule
    if schedule.heads == "transfer" or model.trunk.memory_norm is not None:
        return 1
    return max(FEWEST_PASSES, schedule.autoregressive_levels)


def _draftings(
    target: TargetAdapter, drafter: TrainedDrafter | SmallLMDrafter, length: int
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return a function for each number of passes, and one that also reads the whole context.

    Each function reads new tokens and proposes a tree as in a decoding step.
    """
    tokens = [0] * (length + 1)
    greedy = Sampling(LogitsProcessorList(), do_sample=False)
    timed, budgets = _timed_trees(target, drafter)

    held = Context(target, timed, greedy, 1, length + 1)
    with torch.inference_mode():
        fill(target, held.cache, length)
    held.lengths = [length]

    def draft(budget: Budget, num_read: int) -> object:
        if held.session is not None and held.session.lengths == (length,):
            held.session.rollback(length - num_read)
        return held.propose([tokens], budget, StepRandom()).token_ids.tolist()

    works: dict[tuple[str, int], Callable[[], object]] = {
        ("draft", passes): partial(draft, budget, 2)
        for passes, budget in enumerate(budgets, start=1)
    }
    works["read", 1] = partial(draft, budgets[0], length)
    return works


def _timed_trees(
    target: TargetAdapter, drafter: TrainedDrafter | SmallLMDrafter
) -> tuple[Drafter, list[Budget]]:
    """Return the drafter to time, and the limits of its trees with 1, 2, ... passes."""
    if isinstance(drafter, SmallLMDrafter):
        several = range(1, drafter.settings.depth + 1)
        return drafter, [Budget(drafter.max_nodes, passes) for passes in several]
    parallel = drafter.model.config.settings.schedule.parallel_levels
    shapes = [
        TreeShape(autoregressive_levels=passes, parallel_levels=parallel)
        for passes in range(1, timed_passes(drafter.model) + 1)
    ]
    timed = TrainedDrafter(drafter.model, target, shapes[-1], drafter.preferred)
    return timed, [Budget(shape.max_nodes, shape.depth) for shape in shapes]


def shortest_seconds(
    works: Mapping[KeyT, Callable[[], object]], seconds: float
) -> dict[KeyT, float]:
    """Return the shortest time that each function takes; the functions take turns.

    Other work of the machine only lengthens the times. The functions must wait for their device.
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
    """Fill a cache with a context."""
    tokens = torch.zeros(1, length, dtype=torch.long, device=target.device)
    target.forward(chain_step(tokens, 0), cache)


def verifications(
    target: TargetAdapter, node_counts: Sequence[int]
) -> dict[int, Callable[[], object]]:
    longest = target.spec.max_position
    context = min(CONTEXT, longest // 2)
    again = REPLAYED if target.spec.replays else 0
    # A target with few positions can verify only small trees.
    fitting = [count for count in node_counts if context + again + count < longest]
    most = max(fitting) + again
    cache = target.new_cache(1, context + most + 1)
    tokens = torch.zeros(1, context + most + 1, dtype=torch.long, device=target.device)
    with torch.inference_mode():
        fill(target, cache, context)

    def verify(count: int) -> object:
        step = chain_step(tokens[:, : count + 1 + (again if count else 0)], context)
        if not target.spec.is_recurrent:
            parents = torch.arange(-1, count, device=target.device).expand(1, -1)
            step = replace(step, parents=parents, max_depth=min(count + 1, 4))
        return target.logits(target.forward(step, cache).features).argmax(-1).tolist()

    return {count: partial(verify, count) for count in fitting}
