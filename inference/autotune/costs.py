"""Seconds of verification and drafting on this machine, measured once and interpolated."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from platformdirs import user_cache_path
from transformers import LogitsProcessorList

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import OWN_FORMS, DraftForms
from inference.engine.context import Context
from inference.protocol import Budget
from inference.sampling import Sampling
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter, chain_step
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

NODE_COUNTS = (0, 2, 4, 6, 8, 12, 16, 24)  # numbers of nodes for which verification is timed
# Drafting is timed with 1, 2, ... passes of the drafter's trunk, up to at least this number.
FEWEST_PASSES = 3
CONTEXT = 128  # number of tokens in the context during timing
REPEATS = 9  # number of repetitions, of which the first is a warm-up

_logger = get_logger(__name__)
_Stored = TypeVar("_Stored", bound=Settings)


class Costs(Settings):
    """Seconds that verification and drafting take on this machine."""

    # seconds of a target forward pass over root and nodes, including logits, by number of nodes
    verify: dict[int, float]
    draft: dict[int, float]  # seconds of drafting in a decoding step, by number of trunk passes

    def verify_seconds(self, num_nodes: int) -> float:
        """Return the seconds to verify `num_nodes` nodes, interpolated between measured numbers."""
        known = sorted(self.verify)
        above = next((count for count in known if count >= num_nodes), known[-1])
        below = max((count for count in known if count <= num_nodes), default=above)
        if above == below:
            return self.verify[above]
        share = (num_nodes - below) / (above - below)
        return (1 - share) * self.verify[below] + share * self.verify[above]

    def ceiling(self, shape: TreeShape | None, tau: float) -> float:
        """Return the tokens per second at `tau` if only verification and drafting took time.

        Args:
            shape: shape of the trees; None for autoregressive decoding.
            tau: mean acceptance length, in tokens per target forward pass.
        """
        if shape is None:
            return tau / self.verify_seconds(0)
        seconds = self.verify_seconds(shape.max_nodes) + self.draft[shape.autoregressive_levels]
        return tau / seconds


def measure_costs(
    target: TargetAdapter,
    model: JakiroDrafter,
    max_passes: int,
    forms: DraftForms = OWN_FORMS,
) -> Costs:
    """Measure the seconds of verification and drafting, alternating between the two.

    Verification is timed for each of `NODE_COUNTS`, and drafting for each number of trunk passes.

    Args:
        target: the frozen target.
        model: the drafter.
        max_passes: largest number of trunk passes to time.
        forms: formats of the weights that the drafter computes with.
    """
    verify: dict[int, list[float]] = {count: [] for count in NODE_COUNTS}
    draft: dict[int, list[float]] = {passes: [] for passes in range(1, max_passes + 1)}
    steps, drafts = _verifications(target), _draftings(target, model, max_passes, forms)
    for _ in range(REPEATS):
        for count, step in steps.items():
            verify[count].append(_seconds(step))
        for passes, work in drafts.items():
            draft[passes].append(_seconds(work))
    return Costs(
        verify={count: median(times[1:]) for count, times in verify.items()},
        draft={passes: median(times[1:]) for passes, times in draft.items()},
    )


def timed_passes(model: JakiroDrafter) -> int:
    """Return the largest number of trunk passes to time; it is not below that in training."""
    return max(FEWEST_PASSES, model.config.settings.schedule.autoregressive_levels)


def known_costs(
    target: TargetAdapter,
    model: JakiroDrafter,
    folder: Path | None = None,
    forms: DraftForms = OWN_FORMS,
) -> Costs:
    """Return costs from the cache, or measure the costs in a few seconds and cache them.

    Args:
        target: the frozen target.
        model: the drafter.
        folder: folder of the cache; None for the user's cache folder.
        forms: formats of the weights that the drafter computes with.
    """
    key = fingerprint_of(target, model, forms.model_dump())

    def measure() -> Costs:
        return measure_costs(target, model, timed_passes(model), forms)

    return stored(f"costs-{key[:16]}", Costs, measure, folder)


def stored(
    name: str, kind: type[_Stored], measure: Callable[[], _Stored], folder: Path | None
) -> _Stored:
    """Return a measurement from the cache, or measure and cache the result.

    Args:
        name: name of the measurement, which identifies everything that it depends on.
        kind: type of the measurement.
        measure: function that measures.
        folder: folder of the cache; None for the user's cache folder.
    """
    folder = folder or user_cache_path("jakiro")
    path = folder / f"{name}.json"
    try:
        return kind.model_validate_json(path.read_text())
    except (OSError, ValueError):
        pass
    measured = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, measured.model_dump_json())
    except OSError:
        _logger.warning(
            "cannot store the measured costs in %s; the next run will measure them again", path
        )
    return measured


def fingerprint_of(target: TargetAdapter, model: JakiroDrafter, *more: object) -> str:
    """Return a hash of everything on which measured times depend.

    Args:
        target: the frozen target.
        model: the drafter.
        *more: further JSON-serializable data on which the times depend.
    """
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    machine = [platform.node(), name, os.cpu_count(), torch.get_num_threads(), torch.__version__]
    settings = model.config.settings.model_dump(mode="json")
    return fingerprint(
        timed_passes(model),
        machine,
        target.spec.fingerprint,
        settings,
        str(target.dtype),
        target.is_compiled,
        target.is_packed,
        *more,
    )


def _verifications(target: TargetAdapter) -> dict[int, Callable[[], object]]:
    """Return functions that verify a chain, by the number of nodes in the chain."""
    context = min(CONTEXT, target.spec.max_position // 2)
    cache = target.new_cache(1, context + max(NODE_COUNTS) + 1)
    tokens = torch.zeros(1, context + max(NODE_COUNTS) + 1, dtype=torch.long, device=target.device)
    with torch.inference_mode():
        target.forward(chain_step(tokens[:, :context], 0), cache)

    def verify(count: int) -> object:
        parents = torch.arange(-1, count, device=target.device)[None]
        step = chain_step(tokens[:, : count + 1], context)
        step = replace(step, parents=parents, max_depth=min(count + 1, 4))
        return target.logits(target.forward(step, cache).features).argmax(-1).tolist()

    return {count: partial(verify, count) for count in NODE_COUNTS}


def _draftings(
    target: TargetAdapter, model: JakiroDrafter, max_passes: int, forms: DraftForms
) -> dict[int, Callable[[], object]]:
    """Return functions that draft as in a decoding step, by the number of trunk passes.

    Each function encodes the memory of new tokens and proposes a tree.
    """
    length = min(CONTEXT, target.spec.max_position // 2)
    tokens = [0] * (length + 1)
    greedy = Sampling(LogitsProcessorList(), do_sample=False)

    def start(passes: int) -> Callable[[], object]:
        parallel = model.config.settings.schedule.parallel_levels
        shape = TreeShape(autoregressive_levels=passes, parallel_levels=parallel)
        drafter = TrainedDrafter(model, target, shape, forms)
        context = Context(target, drafter, greedy, 1, length + 1)
        with torch.inference_mode():
            context.read([tokens], 0, length)
        context.lengths = [length]

        def draft() -> object:
            if context.session is not None and context.session.lengths == (length,):
                context.session.rollback(length - 2)
            return context.propose([tokens], Budget(shape.max_nodes), []).token_ids.tolist()

        return draft

    return {passes: start(passes) for passes in range(1, max_passes + 1)}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    with torch.inference_mode():
        work()
    return time.perf_counter() - started
