"""What verification and drafting cost on this machine: measured once, interpolated afterwards."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from transformers import LogitsProcessorList

from inference.drafters.trained import TrainedDrafter
from inference.protocol import Committed
from inference.sampling import Sampling
from inference.tree_builder import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.settings import Settings
from jakiro.target import TargetAdapter, chain_step

NODE_COUNTS = (0, 2, 4, 6, 8, 12, 16, 24)  # trees whose verification is timed
CONTEXT = 128  # verified tokens while timing
REPEATS = 9


class Costs(Settings):
    """Seconds on this machine, of this target and drafter."""

    verify: dict[int, float]  # one target forward over a root and n nodes, logits included
    draft: dict[int, float]  # the drafter's work of one round with A trunk passes

    def verify_seconds(self, num_nodes: int) -> float:
        """Return the time to verify `num_nodes`, interpolated between the measured counts."""
        known = sorted(self.verify)
        above = next((count for count in known if count >= num_nodes), known[-1])
        below = max((count for count in known if count <= num_nodes), default=above)
        if above == below:
            return self.verify[above]
        share = (num_nodes - below) / (above - below)
        return (1 - share) * self.verify[below] + share * self.verify[above]

    def ceiling(self, shape: TreeShape | None, tau: float) -> float:
        """Return tokens per second at `tau` if nothing but verification and drafting took time.

        Args:
            shape: of the trees; None for plain decoding.
            tau: tokens per target forward.
        """
        if shape is None:
            return tau / self.verify_seconds(0)
        seconds = self.verify_seconds(shape.max_nodes) + self.draft[shape.autoregressive_levels]
        return tau / seconds


def measure_costs(target: TargetAdapter, model: JakiroDrafter, max_passes: int) -> Costs:
    """Time verification by number of nodes and drafting by number of passes, in turns.

    Args:
        target: the frozen target.
        model: the drafter.
        max_passes: largest number of trunk passes to time.
    """
    verify: dict[int, list[float]] = {count: [] for count in NODE_COUNTS}
    draft: dict[int, list[float]] = {passes: [] for passes in range(1, max_passes + 1)}
    steps, drafts = _verifications(target), _draftings(target, model, max_passes)
    for _ in range(REPEATS):
        for count, step in steps.items():
            verify[count].append(_seconds(step))
        for passes, one in drafts.items():
            draft[passes].append(_seconds(one))
    return Costs(
        verify={count: median(times[1:]) for count, times in verify.items()},
        draft={passes: median(times[1:]) for passes, times in draft.items()},
    )


def _verifications(target: TargetAdapter) -> dict[int, Callable[[], object]]:
    """Return for each node count a verification of a chain of that many nodes."""
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
    target: TargetAdapter, model: JakiroDrafter, max_passes: int
) -> dict[int, Callable[[], object]]:
    """Return for each number of passes the drafter's work of a round: remember, propose."""
    context = min(CONTEXT, target.spec.max_position // 2)
    tokens = torch.zeros(1, context + 1, dtype=torch.long, device=target.device)
    greedy = Sampling(LogitsProcessorList(), do_sample=False)
    with torch.inference_mode():
        output = target.forward(chain_step(tokens[:, :context], 0), target.new_cache(1, context))
    everything = torch.arange(context, device=target.device)[None]

    def start(passes: int) -> Callable[[], object]:
        parallel = model.config.settings.schedule.parallel_levels
        shape = TreeShape(autoregressive_levels=passes, parallel_levels=parallel)
        drafter = TrainedDrafter(model, target, shape)
        session = drafter.open(greedy, context)
        with torch.inference_mode():
            memory = drafter.encode(output, everything)
            session.advance(Committed(context, tokens, memory))

        def draft() -> object:
            session.rollback(context - 2)
            session.advance(
                Committed(context, tokens[:, -3:], drafter.encode(output, everything[:, -2:]))
            )
            return session.propose(shape.max_nodes, None).token_ids.tolist()

        return draft

    return {passes: start(passes) for passes in range(1, max_passes + 1)}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    with torch.inference_mode():
        work()
    return time.perf_counter() - started
