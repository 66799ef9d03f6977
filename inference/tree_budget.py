"""Chooses a draft tree from measured costs: what verification and drafting take, what they win."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median

import torch
from transformers import LogitsProcessorList

from inference.drafters.trained import TrainedDrafter
from inference.engine import DecodeRun
from inference.preparation import Prompt, encode_prompt, prepare
from inference.protocol import Committed
from inference.recording import RecordingDrafter, RoundRecord
from inference.sampling import Sampling
from inference.tree_builder import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.settings import Settings
from jakiro.target import TargetAdapter, chain_step

NODE_COUNTS = (0, 2, 4, 6, 8, 12, 16)  # trees whose verification is timed
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


class TreeChoice(Settings):
    """A tree, and the figures that speak for it."""

    shape: TreeShape
    costs: Costs
    expected_tau: dict[float, float]  # by temperature
    expected_speedup: dict[float, float]  # over plain decoding


def choose_tree(
    target: TargetAdapter,
    model: JakiroDrafter,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float] = (0.0,),
    *,
    max_passes: int = 3,
    max_new_tokens: int = 48,
) -> TreeChoice:
    """Return the tree with the highest expected speed, as the geometric mean over temperatures.

    For each number of trunk passes a generous tree is decoded once; because smaller trees keep the
    best-ranked nodes, its record tells what every smaller tree would have won.

    Args:
        target: the frozen target.
        model: the drafter.
        prompts: token ids to decode for the record; not those that results are reported on.
        temperatures: at which the tree will be used.
        max_passes: largest number of trunk passes to consider.
        max_new_tokens: decoded for each prompt, temperature, and number of passes.
    """
    shapes = {passes: _generous(model, passes) for passes in range(1, max_passes + 1)}
    costs = measure_costs(target, model, shapes)
    best: TreeChoice | None = None
    for passes, shape in shapes.items():
        records = {
            temperature: _record(target, model, shape, prompts, temperature, max_new_tokens)
            for temperature in temperatures
        }
        for num_nodes in range(1, shape.max_nodes + 1):
            smaller = shapes[passes].model_copy(update={"num_nodes": num_nodes})
            choice = _rate(smaller, costs, records)
            if best is None or _gain(choice) > _gain(best):
                best = choice
    assert best is not None
    return best


def measure_costs(
    target: TargetAdapter, model: JakiroDrafter, shapes: dict[int, TreeShape]
) -> Costs:
    """Time verification by number of nodes and drafting by number of passes, in turns.

    Args:
        target: the frozen target.
        model: the drafter.
        shapes: a tree for each number of passes.
    """
    verify: dict[int, list[float]] = {count: [] for count in NODE_COUNTS}
    draft: dict[int, list[float]] = {passes: [] for passes in shapes}
    steps, drafts = _verifications(target), _draftings(target, model, shapes)
    for _ in range(REPEATS):
        for count, step in steps.items():
            verify[count].append(_seconds(step))
        for passes, one in drafts.items():
            draft[passes].append(_seconds(one))
    return Costs(
        verify={count: median(times[1:]) for count, times in verify.items()},
        draft={passes: median(times[1:]) for passes, times in draft.items()},
    )


def _generous(model: JakiroDrafter, passes: int) -> TreeShape:
    return TreeShape(
        autoregressive_levels=passes,
        parallel_levels=model.config.settings.schedule.parallel_levels,
        children=4,
        breadth=3,
        num_nodes=max(NODE_COUNTS),
    )


def _rate(shape: TreeShape, costs: Costs, records: dict[float, list[RoundRecord]]) -> TreeChoice:
    """Return what the records say of a tree that keeps only `shape.num_nodes` candidates."""
    tau = {
        temperature: sum(
            1 + sum(rank < shape.num_nodes for rank in record.ranks) for record in rounds
        )
        / max(len(rounds), 1)
        for temperature, rounds in records.items()
    }
    plain = costs.ceiling(None, 1.0)
    return TreeChoice(
        shape=shape,
        costs=costs,
        expected_tau=tau,
        expected_speedup={key: costs.ceiling(shape, one) / plain for key, one in tau.items()},
    )


def _gain(choice: TreeChoice) -> float:
    return prod(choice.expected_speedup.values())


def _record(
    target: TargetAdapter,
    model: JakiroDrafter,
    shape: TreeShape,
    prompts: Sequence[Prompt],
    temperature: float,
    max_new_tokens: int,
) -> list[RoundRecord]:
    recorder = RecordingDrafter(TrainedDrafter(model, target, shape))
    limit = target.spec.max_position
    for seed, prompt in enumerate(prompts):
        ids = encode_prompt(prompt, None, target.device)
        request = prepare(
            target.model, ids, temperature, seed, limit, max_new_tokens=max_new_tokens
        )
        for _ in DecodeRun(target, recorder, request):
            pass
    return recorder.records


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
    target: TargetAdapter, model: JakiroDrafter, shapes: dict[int, TreeShape]
) -> dict[int, Callable[[], object]]:
    """Return for each number of passes the drafter's work of a round: remember, propose."""
    context = min(CONTEXT, target.spec.max_position // 2)
    tokens = torch.zeros(1, context + 1, dtype=torch.long, device=target.device)
    greedy = Sampling(LogitsProcessorList(), do_sample=False)
    with torch.inference_mode():
        output = target.forward(chain_step(tokens[:, :context], 0), target.new_cache(1, context))
    everything = torch.arange(context, device=target.device)[None]

    def start(shape: TreeShape) -> Callable[[], object]:
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

    return {passes: start(shape) for passes, shape in shapes.items()}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    with torch.inference_mode():
        work()
    return time.perf_counter() - started
