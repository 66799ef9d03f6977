"""The expected accepted length equals an enumeration of all trees and all continuations."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_settings
from helpers.training import one_document, tiny_training
from helpers.variants import FEEDBACK
from torch import Tensor

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.tree_pass import TreePass
from inference.trees.shape import TreeShape
from training.loss.accepted_length import expected_accepted_length
from training.loss.anchors import ttt_anchors
from training.loss.batch import Batch

VOCAB, DEPTHS = 3, 2
TOKENS = range(VOCAB)


def _distributions(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the distributions of the first token, and of the second one after each first one."""
    logits = torch.randn(1 + VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    first, *second = logits.softmax(-1)
    return first, torch.stack(second)


def _enumerated(target: tuple[Tensor, Tensor], draft: tuple[Tensor, Tensor], k: int) -> float:
    """Return the mean accepted length over all samples of candidates and all continuations."""
    expected = 0.0
    samples = list(itertools.product(TOKENS, repeat=k))
    # A tree: the candidates below the root, and the candidates below each of its children.
    for root, *below in itertools.product(samples, repeat=1 + VOCAB):
        tree = math.prod(draft[0][token].item() for token in root)
        for parent, children in enumerate(below):
            tree *= math.prod(draft[1][parent, token].item() for token in children)
        for one, two in itertools.product(TOKENS, repeat=DEPTHS):
            written = (target[0][one] * target[1][one, two]).item()
            accepted = (1 + (two in below[one])) if one in root else 0
            expected += tree * written * accepted
    return expected


@pytest.mark.parametrize("children", [1, 2])
def test_the_mean_over_texts_is_that_of_all_trees_and_continuations(children: int) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = _distributions(generator), _distributions(generator)
    texts = torch.tensor(list(itertools.product(TOKENS, repeat=DEPTHS)))
    one, two = texts.T
    log_probs = torch.stack((draft[0][one], draft[1][one, two]), dim=1).log()
    lengths = expected_accepted_length(log_probs, torch.ones_like(texts).bool(), children)
    mean = (target[0][one] * target[1][one, two] * lengths).sum().item()
    assert mean == pytest.approx(_enumerated(target, draft, children), abs=1e-9)


def test_gradients_are_those_of_finite_differences_and_end_with_the_text() -> None:
    log_probs = torch.rand(6, 3, dtype=torch.float64).log().requires_grad_()
    exists = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert torch.autograd.gradcheck(lambda x: expected_accepted_length(x, exists, 3), log_probs)
    (slope,) = torch.autograd.grad(expected_accepted_length(log_probs, exists, 3).sum(), log_probs)
    is_reached = exists.cumprod(dim=1).bool()
    assert bool(slope[is_reached].gt(0).all())
    assert not slope[~is_reached].any()


KINDS = {
    "moa-P2": (tiny_settings(parallel_levels=2), 1),
    "feedback-A3-P1": (tiny_settings(trunk=FEEDBACK | {"ttt_steps": 3}), 3),
    "sparse-P1": (tiny_settings(8, active_experts=2), 1),
    "draft-vocabulary-P2": (tiny_settings(parallel_levels=2, draft_vocab_size=23), 1),
}
COUNT, CHILDREN = 9, 3


def _batch(passes: int) -> Batch:
    tokens = torch.randint(0, 26, (1, COUNT), generator=torch.Generator().manual_seed(3))
    starts = np.zeros(COUNT, np.int64)
    anchors = [torch.from_numpy(ttt_anchors(starts, 1 + one)) for one in range(passes)]
    return one_document(tokens, torch.stack(anchors))


def _drafted_length(source: TreePass, text: list[int], num_columns: int) -> float:
    """Return the expected accepted length below a root, from the drafts of decoding."""
    length, reach, frontier = 0.0, 1.0, None
    for depth, token in enumerate(text, start=1):
        log_probs = source.joint(depth, frontier)[0, 0].logsumexp(0)
        prob = log_probs[token].exp().item() if token < num_columns else 0.0
        reach *= 1 - (1 - prob) ** CHILDREN
        length += reach
        if reach == 0:
            break
        frontier = chain_frontier(token)
    return length


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_term_is_the_length_that_decoding_would_draft(name: str) -> None:
    settings, passes = KINDS[name]
    tiny, batch = tiny_training(settings), _batch(passes)
    depth = passes + settings.schedule.parallel_levels
    chain = {"children": 1, "breadth": 1}
    parallel = settings.schedule.parallel_levels
    tree = TreeShape(autoregressive_levels=passes, parallel_levels=parallel, **chain)
    drafter = TrainedDrafter(tiny.drafter, tiny.target, tree)
    expected = 0.0
    for length in range(1, COUNT - 1):
        source = prefilled(drafter, batch.token_ids, length)[0].start_tree()
        text = batch.token_ids[0, length + 1 : length + 1 + depth].tolist()
        expected += _drafted_length(source, text, settings.draft_vocab_size or 61)
    changes = {"accepted_length_weight": 0.5, "accepted_length_children": CHILDREN}
    terms, without = tiny.loss(batch, **changes), tiny.loss(batch)
    assert terms.num_trees == COUNT - 2
    assert terms.accepted_length.item() == pytest.approx(expected, rel=1e-4)
    # The step divides by the positions of all passes, and there is one tree for all passes.
    gain = (without.total - terms.total).item()
    assert gain == pytest.approx(0.5 * passes * expected, rel=1e-3)


def test_gradients_reach_the_drafter_and_do_not_depend_on_chunks() -> None:
    settings, passes = KINDS["feedback-A3-P1"]
    tiny, batch = tiny_training(settings), _batch(passes)
    silent = dict.fromkeys(("token_weight", "feature_weight", "contrast_weight"), 0.0)
    silent |= {"balance_weight": 0.0, "accepted_length_weight": 1.0}
    slopes = []
    for size in (2, 100):
        parts = tiny.gradients(tiny.loss(batch, chunk_size=size, **silent).total)
        slopes.append(torch.cat([part.flatten() for part in parts if part is not None]))
    torch.testing.assert_close(*slopes, atol=1e-5, rtol=1e-4)
    values, used = [], tiny.gradients(tiny.loss(batch, **silent).total)
    step = 1e-3 / slopes[0].norm()
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, slope in zip(tiny.drafter.parameters(), used, strict=True):
                parameter += 0 if slope is None else sign * step * slope
            values.append(tiny.loss(batch, **silent).total)
    got = ((values[0] - values[1]) / (2 * step)).item()
    assert got == pytest.approx(slopes[0].square().sum().item(), rel=0.02)
