"""Expected accepted lengths and acceptance rates equal enumerations, loops, and decoding."""

import math
from itertools import accumulate, product
from operator import mul
from statistics import fmean

import numpy as np
import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_settings
from helpers.training import one_document, random_batch, tiny_training
from helpers.variants import FEEDBACK
from torch import Tensor

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.tree_pass import TreePass
from inference.trees.shape import TreeShape
from training.loss.accepted_length import (
    expected_accepted_length,
    num_depths,
    with_accept_rates,
)
from training.loss.anchors import AnchorRule, ttt_anchors
from training.loss.batch import Batch
from training.loss.objectives import LossTerms
from training.loss.settings import ObjectiveSettings
from training.module import Meter, TrainingModule
from training.processes import Processes

ALONE = Processes(rank=0, count=1, device=torch.device("cpu"))
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
    samples = list(product(TOKENS, repeat=k))
    # A tree: the candidates below the root, and the candidates below each of its children.
    for root, *below in product(samples, repeat=1 + VOCAB):
        tree = math.prod(draft[0][token].item() for token in root)
        for parent, children in enumerate(below):
            tree *= math.prod(draft[1][parent, token].item() for token in children)
        for one, two in product(TOKENS, repeat=DEPTHS):
            written = (target[0][one] * target[1][one, two]).item()
            accepted = (1 + (two in below[one])) if one in root else 0
            expected += tree * written * accepted
    return expected


@pytest.mark.parametrize("children", [1, 2])
def test_the_mean_over_texts_is_that_of_all_trees_and_continuations(children: int) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = _distributions(generator), _distributions(generator)
    texts = torch.tensor(list(product(TOKENS, repeat=DEPTHS)))
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


def _batch(passes: int, vocab: int = 26) -> Batch:
    tokens = torch.randint(0, vocab, (1, COUNT), generator=torch.Generator().manual_seed(3))
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


@pytest.mark.parametrize("name", [*KINDS, "moa-A3-P1"])
@torch.no_grad()
def test_accept_rates_are_those_of_the_distributions_of_decoding(name: str) -> None:
    settings, passes = (KINDS | {"moa-A3-P1": (tiny_settings(), 3)})[name]
    tiny, batch = tiny_training(settings), _batch(passes, vocab=23)
    parallel = settings.schedule.parallel_levels
    depth = passes + parallel
    chain = {"children": 1, "breadth": 1}
    tree = TreeShape(autoregressive_levels=passes, parallel_levels=parallel, **chain)
    drafter = TrainedDrafter(tiny.drafter, tiny.target, tree)
    probs = tiny.target.logits(tiny.view(batch).features)[0].softmax(-1)
    rates, tokens = [list[float]() for _ in range(depth)], []
    for root in range(1, COUNT - 1):
        source, frontier = prefilled(drafter, batch.token_ids, root)[0].start_tree(), None
        text, reached = batch.token_ids[0, root + 1 : root + 1 + depth].tolist(), [1.0]
        for d, token in enumerate(text):
            draft = source.joint(1 + d, frontier)[0, 0].logsumexp(0).exp()
            overlap = torch.minimum(draft, probs[root + d, : len(draft)]).sum().item()
            rates[d].append(overlap)
            reached.append(reached[-1] * overlap)
            frontier = chain_frontier(token)
        if len(text) == depth:
            tokens.append(sum(reached))
    for temperature in (1.0, 0.0, 0.5):
        objective = ObjectiveSettings(token_temperature=temperature, chunk_size=5)
        module = TrainingModule(tiny.drafter, objective, crosses_samples=True)
        meter = Meter(ALONE, 1 + parallel, settings.experts.num_experts, depth)
        reader = tiny.reader(COUNT)
        meter.add(module(reader.view(batch), batch, reader), COUNT)
        metrics = meter.read()
        expected = [fmean(of_depth) for of_depth in rates]
        assert metrics["accept_rate"] == pytest.approx(expected, rel=1e-4)
        assert metrics["tau_probabilistic"] == pytest.approx(fmean(tokens), rel=1e-4)


@pytest.mark.parametrize("crosses_samples", [False, True])
def test_paths_end_with_the_responses_of_a_document(crosses_samples: bool) -> None:
    batch, levels = random_batch([10, 11], [3, 20], [24], samples=2), 2
    is_response = batch.is_response & (torch.arange(24) % 7 > 0)
    anchors = batch.anchors
    if crosses_samples:
        starts = (torch.arange(24) - batch.positions).numpy()
        rule = AnchorRule("ttt", 2, num_samples=2)
        anchors = torch.stack([torch.from_numpy(rule.anchors(own, (0,))) for own in starts])
    batch = Batch(**(vars(batch) | {"is_response": is_response, "anchors": anchors}))
    samples = list(torch.rand(2, 3, 24, levels))
    first, second = samples
    num = num_depths(AnchorRule("ttt" if crosses_samples else "drafting", 2, 2), levels)
    rates, tokens = [list[float]() for _ in range(num)], []
    for sample, (row, i) in product(range(1 if crosses_samples else 2), np.ndindex(3, 24)):
        path, document = [], batch.documents[row, i]
        steps = [(samples[sample], 0, 0), (samples[sample], 0, 1)]
        if crosses_samples:
            steps = [(first, 0, 0), (second, 1, 0), (second, 1, 1)]
        for d, (values, ahead, level) in enumerate(steps, start=1):
            is_there = i + d < 24 and document >= 0 and batch.documents[row, i + d] == document
            if not (is_there and is_response[row, i + d] and anchors[row, sample, i] < i):
                break
            path.append(values[row, i + ahead, level].item())
        for d, rate in enumerate(path):
            rates[d].append(rate)
        if len(path) == num:
            tokens.append(1 + sum(accumulate(path, mul)))
    nothing = LossTerms(*[torch.zeros(())] * len(LossTerms._fields))
    got = with_accept_rates(nothing, samples, batch, crosses_samples)
    assert got.accept.tolist() == pytest.approx([sum(of_depth) for of_depth in rates])
    assert got.depth_count.tolist() == [len(of_depth) for of_depth in rates]
    assert got.path_tokens.item() == pytest.approx(sum(tokens))
    assert 0 < len(tokens) < len(rates[0])


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
    assert slopes[0].any()
