"""Drafting and acceptance: milliseconds of a level, of top-k, and of acceptance when sampling."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from inference.draft_tree import DraftTree
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.acceptance import AcceptResult, accept_trees
from inference.engine.request import SequenceState
from inference.profiling.gpu.arms import NotThere, TimedArm, measured_rows
from inference.profiling.gpu.cycle_drafter import CycleDrafter, fixed_tree
from inference.profiling.gpu.document import Row, SectionResult
from inference.profiling.gpu.target import LOGIT
from inference.profiling.gpu.workbench import Workbench
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import DISTRIBUTION_SIZE
from inference.trees.shape import TreePlan, TreeShape

TOP_P = 0.9
LEVELS = 4  # levels of the trees, with one pass of the drafter each
NUM_RIGHT = 2  # accepted candidates in the measurement of acceptance
EACH_LEVEL, ONE, ALL = "each further level", "1 level", f"{LEVELS} levels"
ACCEPT = "accept"


def measure_drafting(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target, drafter and prompts.
        found: results of earlier sections; they are not used.
    """
    for size in (bench.target.spec.vocab_size, bench.scale.draft_vocab_size):
        yield from _levels(bench, size)
        yield from measured_rows(
            {f"top-{count}": partial(_top, bench, size, count) for count in _counts(bench)},
            {"draft_vocab_size": size},
            bench.scale,
        )
    for siblings in bench.scale.siblings:
        for top_p in (1.0, TOP_P):
            arms = {
                name: arm
                if isinstance(arm, NotThere)
                else partial(arm, bench, siblings=siblings, top_p=top_p)
                for name, arm in ACCEPT_ARMS.items()
            }
            conditions = {"siblings": siblings, "top_p": top_p, "temperature": 1.0}
            yield from measured_rows(arms, conditions, bench.scale)


def _counts(bench: Workbench) -> tuple[int, int]:
    return bench.scale.tree.children, DISTRIBUTION_SIZE


def _levels(bench: Workbench, draft_vocab_size: int) -> Iterator[Row]:
    """Yield the times of whole trees with one and with several levels, and their difference."""
    is_whole = draft_vocab_size == bench.target.spec.vocab_size
    drafter = bench.new_drafter(None) if is_whole else bench.drafter
    levels = {"autoregressive_levels": LEVELS, "parallel_levels": 0}
    greedy, sampling = (shape.model_copy(update=levels) for shape in bench.scale.plan.shapes)
    trained = TrainedDrafter(drafter, bench.target, TreePlan(greedy=greedy, sampling=sampling))
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, TOP_P)):
        conditions = {
            "draft_vocab_size": draft_vocab_size,
            "temperature": temperature,
            "top_p": top_p,
        }
        proposals = {ONE: 1, ALL: LEVELS}
        arms = {
            name: partial(_propose, bench, trained, depth, temperature, top_p)
            for name, depth in proposals.items()
        }
        rows = {row.arm: row for row in measured_rows(arms, conditions, bench.scale)}
        yield from rows.values()
        one, every = (rows[name].number("ms") for name in (ONE, ALL))
        if one is not None and every is not None:
            values = {"ms": (every - one) / (LEVELS - 1)}
            yield Row(arm=EACH_LEVEL, conditions=conditions, values=values)


def _propose(
    bench: Workbench, drafter: TrainedDrafter, depth: int, temperature: float, top_p: float
) -> TimedArm:
    """Return an arm that drafts the same tree again and again, after a prompt."""
    prompts = bench.prompts(bench.scale.main_context)
    generation: dict[str, Any] = {"top_p": top_p} if temperature else {}
    run = bench.start(drafter, prompts, 16, temperature, **generation)
    steps = iter(run)
    for _ in range(2):  # in the second step, the drafter encodes the prompt
        next(steps)
    session = run.context.session
    assert session is not None
    budget = Budget(drafter.max_nodes, depth)

    @torch.inference_mode()
    def work() -> object:
        random = StepRandom([state.stream_key for state in run.live], bench.device)
        return session.propose(budget, random), steps

    return TimedArm(work)


def _top(bench: Workbench, vocab_size: int, count: int) -> TimedArm:
    """Return an arm that selects the best tokens below all expanded nodes of a level."""
    breadth = bench.scale.tree.breadth
    scores = torch.randn(1, breadth, vocab_size, device=bench.device)
    return TimedArm(lambda: scores.topk(count, dim=-1))


def _accept(bench: Workbench, siblings: int, top_p: float) -> TimedArm:
    """Return an arm that accepts candidates of a sampled tree, which has one parent per level."""
    shape = TreeShape(
        autoregressive_levels=LEVELS,
        parallel_levels=0,
        children=siblings,
        breadth=1,
        num_nodes=siblings * LEVELS,
        sampled=True,
    )
    prompts = bench.prompts(bench.scale.main_context)
    run = bench.start(None, prompts, 16, 1.0, top_p=top_p)
    state = run.sequences[0]
    run.close()
    root = torch.tensor([prompts[0][-1:]], device=bench.device)
    oracle = CycleDrafter(bench.cycle, NUM_RIGHT, TreePlan.of(shape))
    tree = oracle.with_right_tokens(fixed_tree(shape, 1, bench.device), root)
    logits = _logits(bench, tree, root)
    results: list[AcceptResult] = []

    @torch.inference_mode()
    def work() -> None:
        random = StepRandom([state.stream_key], bench.device)
        results[:] = accept_trees(tree, logits, [state], random).results

    return TimedArm(work, fault=lambda: _fault(bench, state, results))


def _logits(bench: Workbench, tree: DraftTree, root: torch.Tensor) -> torch.Tensor:
    """Return logits like the target's after the root and each node; the successor is best."""
    tokens = torch.cat((root, tree.token_ids), dim=1)
    shape = (*tokens.shape, bench.target.spec.vocab_size)
    logits = torch.randn(shape, device=bench.device).to(bench.target.dtype)
    best = bench.cycle.successor[tokens][:, :, None]
    return logits.scatter_(2, best, LOGIT)


def _fault(bench: Workbench, state: SequenceState, results: list[AcceptResult]) -> str | None:
    (result,) = results
    drafted = [result.tree.token_ids[node] for node in result.path]
    if len(drafted) != NUM_RIGHT:
        return f"{len(drafted)} instead of {NUM_RIGHT} candidates were accepted"
    return bench.fault([state.request.token_ids], [[*drafted, result.next_token]])


# An arm that the code does not have yet is replaced by a function like the other.
ACCEPT_ARMS: dict[str, Callable[..., TimedArm] | NotThere] = {
    ACCEPT: _accept,
    "accept in one kernel": NotThere("the checks of siblings are operations of torch"),
}
