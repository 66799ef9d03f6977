"""Seconds of verification and drafting on this machine, measured once and interpolated."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LogitsProcessorList

from inference.autotune.measurement import (
    CONTEXT,
    cached,
    seconds_of,
    target_facts,
    verifications,
)
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import OWN_FORMS, DraftForms
from inference.engine.context import Context
from inference.protocol import Budget, CostAware, Drafter
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

NODE_COUNTS = (0, 2, 4, 8, 12, 16, 24)  # numbers of nodes for which verification is timed
# Drafting is timed with 1, 2, ... passes of the drafter's trunk, up to at least this number.
FEWEST_PASSES = 3
REPEATS = 5  # number of repetitions, of which the first is a warm-up

_logger = get_logger(__name__)


class Costs(Settings):
    """Seconds that verification and drafting take on this machine."""

    # seconds of a target forward pass over root and nodes, including logits, by number of nodes
    verify: dict[int, float]
    draft: dict[int, float]  # seconds of drafting in a decoding step, by number of trunk passes

    def verify_seconds(self, num_nodes: int) -> float:
        """Return the seconds to verify `num_nodes` nodes, interpolated between measured numbers.

        Above the largest measured number, the line through the last two measured numbers goes on,
        unless it falls.
        """
        known = sorted(self.verify)
        above = next((count for count in known if count >= num_nodes), known[-1])
        if num_nodes > above and len(known) > 1:
            last = self.verify[above]
            slope = (last - self.verify[known[-2]]) / (above - known[-2])
            return last + max(0.0, slope) * (num_nodes - above)
        below = max((count for count in known if count <= num_nodes), default=above)
        if above == below:
            return self.verify[above]
        share = (num_nodes - below) / (above - below)
        return (1 - share) * self.verify[below] + share * self.verify[above]

    def between(self, other: "Costs", share: float) -> "Costs":
        """Return costs between these and others, for example for a number of sequences in between.

        Args:
            other: the other costs; numbers of nodes and passes that only one of both has are left
                out.
            share: 0 for these costs, 1 for the others.
        """

        def mean(own: dict[int, float], others: dict[int, float]) -> dict[int, float]:
            counts = own.keys() & others.keys()
            return {key: (1 - share) * own[key] + share * others[key] for key in sorted(counts)}

        return Costs(verify=mean(self.verify, other.verify), draft=mean(self.draft, other.draft))

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
    model: JakiroDrafter | SmallLMDrafter | None = None,
    max_passes: int = 0,
    forms: DraftForms = OWN_FORMS,
    batch: int = 1,
) -> Costs:
    """Measure the seconds of verification and drafting, alternating between the two.

    Verification is timed for all `NODE_COUNTS` that fit into the target's context, and drafting for
    each number of trunk passes.

    Args:
        target: the frozen target.
        model: the trained drafter, or the drafter with a small language model; None to time only
            verification.
        max_passes: largest number of trunk passes to time.
        forms: formats of the weights that a trained drafter computes with.
        batch: number of sequences that are decoded together.
    """
    _logger.info("measuring the times of verification and drafting on this machine")
    steps = verifications(target, NODE_COUNTS, batch)
    drafts = {} if model is None else _draftings(target, model, max_passes, forms, batch)
    verify: dict[int, list[float]] = {count: [] for count in steps}
    draft: dict[int, list[float]] = {passes: [] for passes in drafts}
    for _ in range(REPEATS):
        for count, step in steps.items():
            verify[count].append(seconds_of(step))
        for passes, work in drafts.items():
            draft[passes].append(seconds_of(work))
    return Costs(
        # The minimum is used, because other work of the machine only lengthens the times.
        verify={count: min(times[1:]) for count, times in verify.items()},
        draft={passes: min(times[1:]) for passes, times in draft.items()},
    )


def timed_passes(model: JakiroDrafter) -> int:
    """Return the largest number of trunk passes to time, which is at least that of training."""
    return max(FEWEST_PASSES, model.config.settings.schedule.autoregressive_levels)


def known_costs(
    target: TargetAdapter,
    model: JakiroDrafter | SmallLMDrafter | None,
    folder: Path | None = None,
    forms: DraftForms = OWN_FORMS,
    batch: int = 1,
) -> Costs:
    """Return costs from the cache, or measure the costs in a few seconds and cache them.

    Args:
        target: the frozen target.
        model: the trained drafter, or the drafter with a small language model; None to time only
            verification.
        folder: folder of the cache; None for the user's cache folder.
        forms: formats of the weights that a trained drafter computes with.
        batch: number of sequences that are decoded together.
    """
    passes = 0
    key = target_facts(target)
    if isinstance(model, SmallLMDrafter):
        passes = model.settings.depth
        key = [*key, target_facts(model.model), model.settings.model_dump(mode="json")]
    elif model is not None:
        passes = timed_passes(model)
        key = [*key, passes, facts_of(model), forms.model_dump()]
    if batch > 1:
        key = [*key, f"{batch} sequences"]

    def measure() -> Costs:
        return measure_costs(target, model, passes, forms, batch)

    return cached(Costs, "costs", key, measure, folder)


def costs_with(target: TargetAdapter, drafter: Drafter, batch: int = 1) -> Costs:
    """Return the costs of a target with any drafter, from the cache if they are known.

    Only the passes of models take time: those of trained drafters and of small language models. The
    drafting of all other drafters costs nothing.

    Args:
        target: the frozen target.
        drafter: drafter of the trees, which may have a slow part.
        batch: number of sequences that are decoded together.
    """
    slow = drafter.slow_part if isinstance(drafter, CostAware) else drafter
    if isinstance(slow, TrainedDrafter):
        return known_costs(target, slow.model, forms=slow.forms, batch=batch)
    return known_costs(target, slow if isinstance(slow, SmallLMDrafter) else None, batch=batch)


def facts_of(model: JakiroDrafter) -> object:
    """Return everything in a drafter on which times depend, as JSON-serializable data."""
    return model.config.settings.model_dump(mode="json")


def _draftings(
    target: TargetAdapter,
    model: JakiroDrafter | SmallLMDrafter,
    max_passes: int,
    forms: DraftForms,
    batch: int,
) -> dict[int, Callable[[], object]]:
    """Return, for each number of passes, a function that drafts as in a decoding step.

    Each function reads new tokens and proposes a tree.
    """
    length = min(CONTEXT, target.spec.max_position // 2)
    tokens = [0] * (length + 1)
    greedy = Sampling(LogitsProcessorList(), do_sample=False)
    drafter, budgets = _timed_trees(target, model, max_passes, forms)

    def start(budget: Budget) -> Callable[[], object]:
        context = Context(target, drafter, greedy, batch, length + 1)
        with torch.inference_mode():
            context.read([tokens] * batch, 0, length)
        context.lengths = [length] * batch

        def draft() -> object:
            if context.session is not None and context.session.lengths == (length,) * batch:
                context.session.rollback(length - 2)
            return context.propose([tokens] * batch, budget, StepRandom()).token_ids.tolist()

        return draft

    return {passes: start(budget) for passes, budget in enumerate(budgets, start=1)}


def _timed_trees(
    target: TargetAdapter,
    model: JakiroDrafter | SmallLMDrafter,
    max_passes: int,
    forms: DraftForms,
) -> tuple[Drafter, list[Budget]]:
    """Return the drafter to time, and the limits of its trees with 1, 2, ... passes."""
    several = range(1, max_passes + 1)
    if isinstance(model, SmallLMDrafter):
        return model, [Budget(model.max_nodes, passes) for passes in several]
    parallel = model.config.settings.schedule.parallel_levels
    shapes = [
        TreeShape(autoregressive_levels=passes, parallel_levels=parallel) for passes in several
    ]
    drafter = TrainedDrafter(model, target, shapes[-1], forms)
    return drafter, [Budget(shape.max_nodes, shape.depth) for shape in shapes]
