"""Imports published drafters, and compares their predictions with independent forward passes."""

from pathlib import Path

import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.published import PublishedDrafter
from helpers.published_moa import PublishedMoa
from transformers import PreTrainedModel

from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.plan import build_drafter, check_fits
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target

CLOSE = 1e-5  # in double precision, except for the angles of rotary embeddings


def imported(folder: Path, model: PreTrainedModel) -> JakiroDrafter:
    """Return the imported drafter of a published one, in the dtype of its target."""
    return converted(folder, model).to(model.dtype)


def converted(folder: Path, model: PreTrainedModel) -> JakiroDrafter:
    """Return the imported drafter of a published one, in its own dtype."""
    target = TargetAdapter(model)
    plan = plan_import(read_checkpoint(folder))
    check_fits(plan, target)
    record = record_target(target.spec, "tiny")
    return build_drafter(plan.settings, record, plan.weights(target))


@torch.no_grad()
def assert_drafts_equal(
    drafter: JakiroDrafter, published: PublishedDrafter | PublishedMoa, length: int, passes: int = 8
) -> None:
    """Check the distributions of a chain and the scores of a tree."""
    target = TargetAdapter(published.target)
    parallel = drafter.config.settings.schedule.parallel_levels
    generator = torch.Generator().manual_seed(length)
    ids = torch.arange(target.spec.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    drafted = ids[torch.randint(len(ids), (1, passes + parallel), generator=generator)]
    tokens = torch.randint(0, target.spec.vocab_size, (1, length + 1), generator=generator)
    prompt, root = tokens[0, :length].tolist(), int(tokens[0, length])
    path = [root, *drafted[0].tolist()]
    levels = {"autoregressive_levels": passes, "parallel_levels": parallel}
    chain = TrainedDrafter(drafter.eval(), target, TreeShape(**levels, breadth=1))
    source = prefilled(chain, tokens, length)[0].start_tree()
    expected = published.logits(prompt, path[:passes]).log_softmax(-1)
    for step in range(passes + parallel):
        frontier = None
        if step:
            column = int((ids == path[step]).nonzero())
            frontier = chain_frontier(path[step])._replace(columns=torch.tensor([[column]]))
        got = source.joint(step + 1, frontier)[0, 0].logsumexp(0)
        difference = (got - expected[step][ids]).abs().max()
        assert difference < CLOSE, f"drafted step {step + 1}: {difference}"
    _assert_tree_equal(drafter, published, target, tokens)


def _assert_tree_equal(
    drafter: JakiroDrafter,
    published: PublishedDrafter | PublishedMoa,
    target: TargetAdapter,
    tokens: torch.Tensor,
) -> None:
    length = tokens.shape[1] - 1
    shape = TreeShape(
        autoregressive_levels=3, parallel_levels=0, children=3, breadth=2, num_nodes=9
    )
    session, _ = prefilled(TrainedDrafter(drafter, target, shape), tokens, length)
    tree = session.propose(Budget(9), StepRandom())
    own = tree.sequence_tree()
    assert tree.num_nodes == 9
    prompt, root = tokens[0, :length].tolist(), int(tokens[0, length])
    for node in range(tree.num_nodes):
        path = [own.token_ids[index] for index in own.path(node)]
        log_probs = published.logits(prompt, [root, *path[:-1]]).log_softmax(-1)
        score = sum(float(row[token]) for row, token in zip(log_probs, path, strict=False))
        assert abs(float(tree.score[0, node]) - score) < len(path) * CLOSE
