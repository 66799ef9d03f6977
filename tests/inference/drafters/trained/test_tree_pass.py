"""Draft distributions equal their definition for one and several experts and parallel levels."""

import itertools

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tables import frontier_of
from helpers.variants import FEEDBACK, HYBRID
from torch import Tensor

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.tree_pass import TreePass
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter

TRUNKS = {"moa": {}, "feedback": FEEDBACK, "hybrid": HYBRID}


@pytest.mark.parametrize(("trunk", "parallel_levels"), [("moa", 0), ("feedback", 1), ("hybrid", 2)])
@torch.no_grad()
def test_without_experts_both_ways_to_combine_draft_the_same_tree(
    trunk: str, parallel_levels: int
) -> None:
    target = TargetAdapter(tiny_llama())
    summed, mixed = (
        tiny_drafter(target, tiny_settings(1, combine, parallel_levels, trunk=TRUNKS[trunk]))
        for combine in ("sum", "mixture")
    )
    mixed.load_state_dict(summed.state_dict())
    shape = TreeShape(autoregressive_levels=3, parallel_levels=parallel_levels, num_nodes=30)
    tokens = torch.randint(0, 61, (1, 9))
    one, other = (
        prefilled(TrainedDrafter(model, target, shape), tokens, 8)[0].propose(
            Budget(30), StepRandom()
        )
        for model in (summed, mixed)
    )
    assert torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.parent, other.parent)
    torch.testing.assert_close(one.score, other.score)


def _settings(num_experts: int, parallel_levels: int, **changes: object) -> DrafterSettings:
    return tiny_settings(num_experts, parallel_levels=parallel_levels, **changes)


DRAFTED = [0, 2, 3, 5, 6]  # the draft vocabulary, if there is one
VARIANTS = {
    **{
        f"E{experts}-P{parallel}": _settings(experts, parallel)
        for experts, parallel in itertools.product((1, 2, 4), (1, 2, 3))
    },
    "feedback-E2-P2": _settings(2, 2, trunk=FEEDBACK),
    "hybrid-E4-P2": _settings(4, 2, trunk=HYBRID),
    "E4-P2-draft-vocabulary": _settings(4, 2, draft_vocab_size=5),
}


def _source(settings: DrafterSettings, breadth: int = 1) -> TreePass:
    """Return the distributions below a root, in which all levels but the first are parallel."""
    target = TargetAdapter(tiny_llama(vocab=7))
    model = tiny_drafter(target, settings)
    if model.draft_ids is not None:
        model.draft_ids.copy_(torch.tensor(DRAFTED))
    parallel = settings.schedule.parallel_levels
    shape = TreeShape(autoregressive_levels=1, parallel_levels=parallel, breadth=breadth)
    tokens = torch.randint(0, 7, (1, 9))
    session, _ = prefilled(TrainedDrafter(model, target, shape), tokens, 8)
    return session.start_tree()


def _components(source: TreePass) -> tuple[Tensor, Tensor]:
    """Return weights [expert] and probabilities [level, expert, vocab] of the only pass."""
    source.joint(1, None)
    assert source.output is not None
    weights = source.output.log_weights[0, 0].double().exp()
    return weights, source.level_log_probs[0, 0].double().exp()


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_posterior_routing_equals_the_brute_force_joint_distribution(name: str) -> None:
    """Levels are the conditionals of the joint P(t1, .., tk) = sum_e w_e prod_i p^i_e(ti)."""
    settings = VARIANTS[name]
    levels = 1 + settings.schedule.parallel_levels
    weights, level_probs = _components(_source(settings))
    joint = weights
    for probs in level_probs:  # [expert, t1, .., tk] times p^k_e
        joint = joint.unsqueeze(-1) * probs[(slice(None), *(None,) * (joint.ndim - 1))]
    brute = joint.sum(0)
    drafted = range(7) if settings.draft_vocab_size is None else DRAFTED
    for tokens in _paths(levels, count=6):
        path = tuple(drafted.index(token) for token in tokens)  # columns of the distributions
        source, score, frontier = _source(settings), 0.0, None
        for depth, column in enumerate(path, start=1):
            log_probs = source.joint(depth, frontier)[0, 0].logsumexp(0).double()
            assert log_probs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
            score += log_probs[column].item()
            frontier = chain_frontier(column)
        assert torch.tensor(score).exp().item() == pytest.approx(brute[path].item(), rel=2e-4)


def _paths(levels: int, count: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(levels)
    sampled = torch.tensor(DRAFTED)[torch.randint(0, 5, (count, levels), generator=generator)]
    return [tuple(path) for path in sampled.tolist()]


@torch.no_grad()
def test_siblings_are_routed_apart_each_by_its_own_token() -> None:
    settings = VARIANTS["E4-P2"]
    source = _source(settings, breadth=2)
    source.joint(1, None)
    pair = source.joint(2, frontier_of(torch.tensor([[2, 5]]), torch.zeros(1, 2, dtype=torch.long)))
    deeper = frontier_of(torch.tensor([[3, 3, 1]]), torch.tensor([[1, 0, 1]]))
    below = source.joint(3, deeper)
    for index, path in enumerate([(5, 3), (2, 3), (5, 1)]):
        alone = _source(settings)
        alone.joint(1, None)
        second = alone.joint(2, chain_frontier(path[0]))
        torch.testing.assert_close(pair[0, (2, 5).index(path[0])], second[0, 0])
        third = alone.joint(3, chain_frontier(path[1]))
        torch.testing.assert_close(below[0, index], third[0, 0])
    assert not torch.allclose(pair[0, 0].logsumexp(0), pair[0, 1].logsumexp(0))


@torch.no_grad()
def test_one_expert_drafts_independent_heads() -> None:
    settings = VARIANTS["E1-P3"]
    _, level_probs = _components(_source(settings))
    for path in _paths(3, count=4):
        source = _source(settings)
        source.joint(1, None)
        for depth, token in enumerate(path, start=2):
            probs = source.joint(depth, chain_frontier(token))[0, 0, 0].double().exp()
            torch.testing.assert_close(probs, level_probs[depth - 1, 0], atol=1e-6, rtol=1e-5)
