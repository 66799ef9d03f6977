"""Draft distributions equal their definition for one and several experts and parallel levels."""

import itertools
from functools import cache

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tables import Tables, frontier_of, no_processors, two_step_error
from helpers.variants import FEEDBACK, HYBRID
from torch import Tensor

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.tree_pass import TreePass
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeLevel
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


class _RealDrafter(Tables):
    """Random target logits, and the draft distributions of a trained drafter, in float64."""

    def __init__(self, settings: DrafterSettings, shape: TreeShape) -> None:
        super().__init__(vocab=3, components=1, seed=5)
        target = TargetAdapter(tiny_llama(vocab=3, initializer_range=0.5).double())
        model = tiny_drafter(target, settings).double()
        if model.draft_ids is not None:
            model.draft_ids.copy_(torch.tensor([0, 2]))
        for weight in (model.path_features or model).parameters():
            torch.nn.init.normal_(weight, std=0.4)  # so that a path changes distributions
        self.drafter = TrainedDrafter(model, target, shape)
        self.level = cache(self._level)

    def source(self, prefix: tuple[int, ...]) -> "_Remembered":
        return _Remembered(self, prefix)

    def _level(self, prefix: tuple[int, ...], parent: int | None) -> Tensor:
        """Return the first level of a tree below a prefix, or the second one below a token."""
        source = prefilled(self.drafter, torch.tensor([prefix]), len(prefix) - 1)[0].start_tree()
        first = source.joint(1, None)
        return first if parent is None else source.joint(2, self._chain(parent))

    def _chain(self, token: int) -> TreeLevel:
        ids = self.drafter.head.token_ids
        column = token if ids is None else ids.tolist().index(token)
        return chain_frontier(token)._replace(columns=torch.tensor([[column]]))


class _Remembered:
    """The draft distributions of trees of two levels, each of which is computed once."""

    def __init__(self, tables: _RealDrafter, prefix: tuple[int, ...]) -> None:
        self.tables, self.prefix = tables, prefix
        self.draft_ids = tables.drafter.head.token_ids

    def joint(self, _depth: int, frontier: TreeLevel | None) -> Tensor:
        if frontier is None:
            return self.tables.level(self.prefix, None)
        tokens = frontier.token_ids[0].tolist()
        return torch.cat([self.tables.level(self.prefix, token) for token in tokens], dim=1)


BLOCK = {"parallel_heads": "masks", "source": "hidden", "path": "embedding"}
PATHS = {
    "block": (1, _settings(1, 1, trunk={"kind": "block"}, autoregressive_levels=1, **BLOCK)),
    "block, experts, few tokens": (
        1,
        _settings(
            2, 1, trunk={"kind": "block"}, autoregressive_levels=1, draft_vocab_size=2, **BLOCK
        ),
    ),
    "tables": (
        1,
        _settings(
            1,
            1,
            trunk={"kind": "block"},
            autoregressive_levels=1,
            path_rank=3,
            **BLOCK | {"path": "tables"},
        ),
    ),
    "block, recurrent": (
        1,
        _settings(
            2,
            1,
            trunk={"kind": "block"},
            autoregressive_levels=1,
            **BLOCK | {"path": "recurrent"},
        ),
    ),
    "feedback, experts": (1, _settings(2, 1, trunk=FEEDBACK, path="embedding")),
}


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", PATHS)
@torch.no_grad()
def test_the_output_law_is_the_targets_where_levels_know_their_path(
    name: str, sampled: bool
) -> None:
    passes, settings = PATHS[name]
    levels = {"autoregressive_levels": passes, "parallel_levels": 1}
    shape = TreeShape(**levels, children=2, breadth=2, num_nodes=4, sampled=sampled)
    tables = _RealDrafter(settings, shape)
    assert two_step_error(tables, shape, no_processors(), length=2) < 1e-6
    below = [tables.level((0, 1), token) for token in (0, 2)]
    assert not torch.allclose(*below, atol=1e-2)  # the path makes a difference


@torch.no_grad()
def test_a_parent_may_be_any_token_also_one_that_is_never_drafted() -> None:
    settings = _settings(
        1, 1, trunk={"kind": "block"}, autoregressive_levels=1, draft_vocab_size=5, **BLOCK
    )
    source = _source(settings)
    source.joint(1, None)
    parent = frontier_of(torch.tensor([[4]]), torch.zeros(1, 1, dtype=torch.long))  # not in DRAFTED
    got = source.joint(2, parent)
    model, head = source.cache.model, source.head
    assert source.output is not None
    assert model.path_features is not None
    shift = model.path_features(head.target.embed(torch.tensor([[4]])), 1)
    expected = head.log_probs(source.output.features[:, :, 1] + shift.unsqueeze(2))
    torch.testing.assert_close(got, expected)
