"""Seconds of verification and drafting on this machine, measured once and interpolated."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from inference.autotune.measurement import (
    CONTEXT,
    cached,
    fill,
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
LONG_CONTEXT = 1024  # number of tokens of a second context in which steps are timed
LONG_NODE_COUNTS = (0, 8, 24)  # numbers of nodes for which verification is timed there
# Drafting is timed with 1, 2, ... passes of the drafter's trunk, up to at least this number.
FEWEST_PASSES = 3
REPEATS = 5  # number of repetitions, of which the first is a warm-up
FEWEST_REPEATS = 3  # number of repetitions of a brief measurement

_logger = get_logger(__name__)


class Costs(Settings):
    """Seconds that verification and drafting take on this machine."""

    # seconds of a target forward pass over root and nodes, including logits, by number of nodes
    verify: dict[int, float]
    draft: dict[int, float]  # seconds of drafting in a decoding step, by number of trunk passes
    read: float = 0.0  # seconds in which the drafter reads one token of a context
    # the costs with `LONG_CONTEXT` instead of `CONTEXT` tokens in the context; None if not measured
    long: "Costs | None" = None

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

    def verify_growth(self, num_nodes: int) -> float:
        """Return the seconds by which each further token of the context lengthens verification."""
        if self.long is None:
            return 0.0
        both = self.verify.keys() & self.long.verify.keys()
        longer = {count: self.long.verify[count] - self.verify[count] for count in both}
        between = Costs(verify=longer, draft={}).verify_seconds(num_nodes)
        return max(0.0, between) / (LONG_CONTEXT - CONTEXT)

    def draft_growth(self, passes: int) -> float:
        """Return the seconds by which each further token of the context lengthens drafting."""
        if self.long is None:
            return 0.0
        longer = self.long.draft[passes] - self.draft[passes]
        return max(0.0, longer) / (LONG_CONTEXT - CONTEXT)

    def between(self, other: "Costs", share: float) -> "Costs":
        """Return costs between these (share 0) and others (share 1)."""

        def mean(own: dict[int, float], others: dict[int, float]) -> dict[int, float]:
            counts = own.keys() & others.keys()
            return {key: (1 - share) * own[key] + share * others[key] for key in sorted(counts)}

        return Costs(
            verify=mean(self.verify, other.verify),
            draft=mean(self.draft, other.draft),
            read=(1 - share) * self.read + share * other.read,
            long=self.long.between(other.long, share) if self.long and other.long else None,
        )


def measure_costs(
    target: TargetAdapter,
    model: JakiroDrafter | SmallLMDrafter | None = None,
    max_passes: int = 0,
    forms: DraftForms = OWN_FORMS,
    batch: int = 1,
    *,
    is_brief: bool = False,
) -> Costs:
    """Measure the seconds of verification and drafting, alternating between all of them.

    Verification is timed for all `NODE_COUNTS` that fit into the target's context, and drafting for
    each number of trunk passes; both are timed again in a long context, if the target allows it and
    there is a single sequence.
    """
    _logger.info("measuring the times of verification and drafting on this machine")
    timed: dict[int, tuple[int, ...]] = {CONTEXT: LONG_NODE_COUNTS if is_brief else NODE_COUNTS}
    # The caches of many long sequences would need much memory.
    if batch == 1 and not is_brief and target.spec.max_position >= 2 * LONG_CONTEXT:
        timed[LONG_CONTEXT] = LONG_NODE_COUNTS
    works: dict[_Part, Callable[[], object]] = {}
    for context, counts in timed.items():
        steps = verifications(target, counts, batch, context)
        works |= {_Part(context, "verify", count): step for count, step in steps.items()}
        if model is not None:
            works |= _draftings(target, model, max_passes, forms, batch, context)
    times: dict[_Part, list[float]] = {part: [] for part in works}
    for _ in range(FEWEST_REPEATS if is_brief else REPEATS):
        for part, work in works.items():
            times[part].append(seconds_of(work))
    # The minimum is used, because other work of the machine only lengthens the times.
    seconds = {part: min(several[1:]) for part, several in times.items()}
    return _costs_in(seconds, CONTEXT).model_copy(
        update={"long": _costs_in(seconds, LONG_CONTEXT) if LONG_CONTEXT in timed else None}
    )


def timed_passes(model: JakiroDrafter) -> int:
    """Return the largest number of trunk passes to time, which is at least that of training.

    A drafter with `parallel_heads: transfer` has only one pass, because its first pass does not
    return what a second one would have to read.
    """
    schedule = model.config.settings.schedule
    if schedule.heads == "transfer":
        return 1
    return max(FEWEST_PASSES, schedule.autoregressive_levels)


def known_costs(
    target: TargetAdapter,
    model: JakiroDrafter | SmallLMDrafter | None,
    folder: Path | None = None,
    forms: DraftForms = OWN_FORMS,
    batch: int = 1,
    *,
    is_brief: bool = False,
) -> Costs:
    passes = 0
    key = [*target_facts(target), LONG_CONTEXT]
    if isinstance(model, SmallLMDrafter):
        passes = model.settings.depth
        key = [*key, target_facts(model.model), model.settings.model_dump(mode="json")]
    elif model is not None:
        passes = timed_passes(model)
        key = [*key, passes, facts_of(model), forms.model_dump()]
    if batch > 1:
        key = [*key, f"{batch} sequences"]
    if is_brief:
        key = [*key, "brief"]

    def measure() -> Costs:
        return measure_costs(target, model, passes, forms, batch, is_brief=is_brief)

    return cached(Costs, "costs", key, measure, folder)


def costs_with(
    target: TargetAdapter, drafter: Drafter | None, batch: int = 1, *, is_brief: bool = False
) -> Costs:
    """Return the costs of a target with any drafter, from the cache if they are known.

    Only the passes of models take time: those of trained drafters and of small language models. The
    drafting of all other drafters costs nothing.
    """
    slow = drafter.slow_part if isinstance(drafter, CostAware) else drafter
    if isinstance(slow, TrainedDrafter):
        return known_costs(target, slow.model, forms=slow.forms, batch=batch, is_brief=is_brief)
    model = slow if isinstance(slow, SmallLMDrafter) else None
    return known_costs(target, model, batch=batch, is_brief=is_brief)


def facts_of(model: JakiroDrafter) -> object:
    """Return everything in a drafter on which times depend, as JSON-serializable data."""
    return model.config.settings.model_dump(mode="json")


class _Part(NamedTuple):
    """A part of a decoding step that is timed.

    Attributes:
        kind: "verify", "draft", or "read" for drafting after the drafter has read the whole
            context.
    """

    context: int
    kind: str
    number: int


def _costs_in(seconds: Mapping[_Part, float], context: int) -> Costs:
    """Return the costs in a context of the given length."""

    def of(kind: str) -> dict[int, float]:
        own = (part for part in seconds if part.context == context and part.kind == kind)
        return {part.number: seconds[part] for part in own}

    draft, read = of("draft"), of("read")
    reading = (max(0.0, read[passes] - draft[passes]) for passes in read)
    return Costs(verify=of("verify"), draft=draft, read=max(reading, default=0.0) / context)


def _draftings(
    target: TargetAdapter,
    model: JakiroDrafter | SmallLMDrafter,
    max_passes: int,
    forms: DraftForms,
    batch: int,
    context: int,
) -> dict[_Part, Callable[[], object]]:
    """Return a function for each number of passes, and one that also reads the whole context.

    Each function reads new tokens and proposes a tree as in a decoding step.
    """
    length = min(context, target.spec.max_position // 2)
    tokens = [0] * (length + 1)
    greedy = Sampling(LogitsProcessorList(), do_sample=False)
    drafter, budgets = _timed_trees(target, model, max_passes, forms)

    def start(budget: Budget, num_read: int) -> Callable[[], object]:
        held = Context(target, drafter, greedy, batch, length + 1)
        with torch.inference_mode():
            fill(target, held.cache, batch, length)
        held.lengths = [length] * batch

        def draft() -> object:
            if held.session is not None and held.session.lengths == (length,) * batch:
                held.session.rollback(length - num_read)
            return held.propose([tokens] * batch, budget, StepRandom()).token_ids.tolist()

        return draft

    works = {
        _Part(context, "draft", passes): start(budget, 2)
        for passes, budget in enumerate(budgets, start=1)
    }
    return works | {_Part(context, "read", 1): start(budgets[0], length)}


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
