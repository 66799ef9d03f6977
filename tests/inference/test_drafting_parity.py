"""Training and decoding see the same drafter: a masked pass equals cached, stepwise drafting."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from torch import Tensor
from transformers import LogitsProcessorList

from inference.context import Context
from inference.draft_tree import DraftTree
from inference.drafters.trained import TrainedDrafter, TrainedSession
from inference.drafters.tree_pass import TreePass
from inference.engine import DecodeRun
from inference.preparation import prepare_requests
from inference.protocol import Budget, Committed, MemoryRows
from inference.sampling import Sampling
from inference.tree_builder import Frontier
from inference.tree_shape import TreeShape
from jakiro.mixture import joint_log_probs, posterior_log_weights
from jakiro.target import StepOutput, TargetAdapter, chain_step
from training.batch import Batch
from training.views import draft_all_positions, look_at_target

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)
VARIANTS = [
    tiny_settings(num_experts=2, combine="mixture", parallel_levels=2),
    tiny_settings(num_experts=2, combine="sum", parallel_levels=1),
    tiny_settings(num_experts=4, combine="sum", parallel_levels=2, contrastive_head=False),
    tiny_settings(num_experts=1, combine="mixture", parallel_levels=1),
    tiny_settings(layers=(0, 2), common_width=12),
    tiny_settings(source="hidden"),
    tiny_settings(source="hidden", layer_attention=False),
    tiny_settings(source="hidden", layers=(3, 1), layer_attention=False),
    tiny_settings(source="hidden", layers=(0, 2), common_width=12),
    tiny_settings(layers=(2, 0), layer_attention=False),
]


def _ids(settings: object) -> str:
    bank, schedule = settings.bank, settings.schedule  # type: ignore[attr-defined]
    memory = settings.memory  # type: ignore[attr-defined]
    layers = "" if memory.layer_attention else "-no-LSA"
    return (
        f"E{bank.num_experts}-{bank.combine}-P{schedule.parallel_levels}-{memory.source}"
        f"{memory.layers or ''}{layers}"
    )


def _prefilled(
    drafter: TrainedDrafter, tokens: Tensor, length: int
) -> tuple[TrainedSession, StepOutput]:
    """Return a session that has verified `length` tokens; the root is the next one."""
    target = drafter.target
    cache = target.new_cache(1, 64, drafter.hidden_states)
    output = target.forward(chain_step(tokens[:, :length], 0), cache)
    session = drafter.open(GREEDY, capacity=64)
    memory = drafter.encode(output, torch.arange(length)[None])
    session.advance(_committed(tokens, 0, length, memory))
    return session, output


def _committed(tokens: Tensor, start: int, end: int, memory: MemoryRows) -> Committed:
    return Committed((end,), (end - start,), tokens[:, start:end], tokens[:, end : end + 1], memory)


def _one_row(tokens: Tensor, anchors: Tensor) -> Batch:
    count = tokens.shape[1]
    return Batch(
        token_ids=tokens,
        positions=torch.arange(count)[None],
        documents=torch.zeros(1, count, dtype=torch.long),
        is_response=torch.ones(1, count, dtype=torch.bool),
        anchors=anchors[None, None],
    )


@pytest.mark.parametrize("settings", VARIANTS, ids=_ids)
@torch.no_grad()
def test_masked_training_pass_equals_cached_drafting_at_every_depth(settings: object) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, settings)  # type: ignore[arg-type]
    parallel = settings.schedule.parallel_levels  # type: ignore[attr-defined]
    depth, length = 4, 7
    tokens = torch.randint(0, 61, (1, length + depth + parallel))
    # Position length + d - 1 is drafted at distance d from the last verified one, length - 1.
    anchors = torch.arange(tokens.shape[1]).clamp(max=length - 1)
    batch = _one_row(tokens, anchors)
    view = look_at_target(
        target, batch, model.state_source, target.new_cache(1, 32, model.state_source.hidden_states)
    )
    trained = next(iter(draft_all_positions(model, view, batch)))

    shape = TreeShape(autoregressive_levels=depth, parallel_levels=parallel, breadth=1)
    drafter = TrainedDrafter(model, target, shape)
    source = _prefilled(drafter, tokens, length)[0].start_tree()
    weights = trained.log_weights[:, length + depth - 1 : length + depth]
    for step in range(1, depth + parallel + 1):
        frontier = None
        if step > 1:
            token = tokens[:, length + step - 1 : length + step]
            frontier = Frontier(token, torch.zeros_like(token))
        got = source.joint(step, frontier)
        level = max(0, step - depth)
        place = length + min(step, depth) - 1
        logits = target.logits(trained.features[:, place : place + 1, level])
        prior = weights if level else trained.log_weights[:, place : place + 1]
        expected = joint_log_probs(logits, prior)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        if step >= depth and step < depth + parallel:
            follows = tokens[0, length + step]
            weights = posterior_log_weights(expected[..., follows], prior)


@pytest.mark.parametrize(("passes", "parallel"), [(3, 1), (2, 2), (1, 3)])
@torch.no_grad()
def test_a_tree_step_equals_one_linear_pass_per_path(passes: int, parallel: int) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, tiny_settings(parallel_levels=parallel))
    levels = {"autoregressive_levels": passes, "parallel_levels": parallel}
    shape = TreeShape(**levels, breadth=3, children=3, num_nodes=99)
    tokens = torch.randint(0, 61, (1, 9))
    session, _ = _prefilled(TrainedDrafter(model, target, shape), tokens, 8)
    tree = session.propose(Budget(99), [])
    row = tree.row()
    assert tree.num_nodes == 3 + 9 + 9 + 9
    chain = TreeShape(**levels, breadth=1)
    for node in range(tree.num_nodes):
        path = [row.token_ids[index] for index in row.path(node)]
        fresh, _ = _prefilled(TrainedDrafter(model, target, chain), tokens, 8)
        expected = _score_of_path(fresh.start_tree(), path)
        assert tree.score[0, node].item() == pytest.approx(expected, abs=1e-4)


def _score_of_path(source: TreePass, path: list[int]) -> float:
    score, frontier = 0.0, None
    for depth, token in enumerate(path, start=1):
        joint = source.joint(depth, frontier)
        score += joint[0, 0, :, token].logsumexp(0).item()
        frontier = Frontier(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))
    return score


MEMORIES = [{}, {"source": "hidden", "layers": (3, 1)}]


@pytest.mark.parametrize("memory", MEMORIES, ids=["kv", "hidden"])
@torch.no_grad()
def test_rows_projected_after_accept_equal_rows_of_a_fresh_prefill(memory: dict[str, Any]) -> None:
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target, tiny_settings(**memory)), target, TreeShape())
    tokens = torch.randint(0, 61, (1, 15))
    session, output = _prefilled(drafter, tokens, 8)
    session.propose(Budget(8), [])  # leaves drafted rows behind, which must not matter
    more = target.forward(chain_step(tokens[:, 8:12], 8), output.cache)
    session.advance(_committed(tokens, 8, 12, drafter.encode(more, torch.arange(4)[None])))
    fresh, _ = _prefilled(drafter, tokens, 12)
    for kept, new in ((session.own_rows, fresh.own_rows), (session.memory, fresh.memory)):
        for got, expected in zip(kept.prefix(12), new.prefix(12), strict=True):
            close = {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(got[:, :, :12], expected[:, :, :12], **close)
    again, expected_tree = session.propose(Budget(8), []), fresh.propose(Budget(8), [])
    assert torch.equal(again.token_ids, expected_tree.token_ids)


@pytest.mark.parametrize("memory", MEMORIES, ids=["kv", "hidden"])
@torch.no_grad()
def test_the_engine_drafts_from_what_was_emitted_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    model = tiny_llama(vocab=11)
    target = TargetAdapter(model)
    drafter = TrainedDrafter(tiny_drafter(target, tiny_settings(**memory)), target, TreeShape())
    requests, _ = prepare_requests(
        model, [[1, 2, 3], [4, 5, 6, 7, 8]], seed=0, max_position=128, max_new_tokens=20
    )
    run = DecodeRun(target, drafter, requests)
    drafted: list[tuple[list[list[int]], DraftTree]] = []
    original = Context.propose

    def noted(self: Context, token_ids: Any, *limits: Any) -> DraftTree:
        tree = original(self, token_ids, *limits)
        drafted.append(([list(ids) for ids in token_ids], tree))
        return tree

    monkeypatch.setattr(Context, "propose", noted)
    run.finish()
    assert len(drafted) > 3
    for several, tree in drafted:
        for row, ids in enumerate(several):
            session, _ = _prefilled(drafter, torch.tensor([ids]), len(ids) - 1)
            fresh = session.propose(Budget(drafter.max_nodes), [])
            assert tree.token_ids[row].tolist() == fresh.token_ids[0].tolist()
            torch.testing.assert_close(tree.score[row], fresh.score[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_advancing_twice_changes_nothing_and_a_gap_is_refused() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target), target, TreeShape())
    tokens = torch.randint(0, 61, (1, 12))
    session, output = _prefilled(drafter, tokens, 8)
    memory = drafter.encode(output, torch.arange(8)[None])
    before = session.propose(Budget(8), [])
    session.advance(_committed(tokens, 0, 8, memory))
    assert torch.equal(session.propose(Budget(8), []).token_ids, before.token_ids)
    with pytest.raises(ValueError, match="session ends at"):
        session.advance(_committed(tokens, 9, 11, memory))


@pytest.mark.parametrize("combine", ["sum", "mixture"])
@torch.no_grad()
def test_without_experts_both_ways_to_combine_are_the_same_head(combine: str) -> None:
    target = TargetAdapter(tiny_llama())
    one = tiny_drafter(target, tiny_settings(num_experts=1, combine=combine))
    other = tiny_drafter(target, tiny_settings(num_experts=1, combine="mixture"))
    other.load_state_dict(one.state_dict())
    vectors = torch.randn(1, 5, 32)
    for got, expected in zip(one.bank(vectors), other.bank(vectors), strict=True):
        torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_posterior_routing_equals_the_brute_force_joint_law() -> None:
    """P(t1, t2) = sum_e w_e p1_e(t1) p2_e(t2), and the parallel level is its conditional."""
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, tiny_settings(autoregressive_levels=1))
    shape = TreeShape(
        autoregressive_levels=1, parallel_levels=1, breadth=4, children=4, num_nodes=99
    )
    session, _ = _prefilled(TrainedDrafter(model, target, shape), torch.randint(0, 61, (1, 9)), 8)
    source = session.start_tree()
    source.joint(1, None)
    laws = source.level_log_probs[0, 0].exp()  # [level, expert, vocab]
    weights = source.log_weights[0, 0].exp()
    brute = torch.einsum("e,ea,eb->ab", weights, laws[0], laws[1])
    tree = session.propose(Budget(99), [])
    row = tree.row()
    for node in range(tree.num_nodes):
        path = [row.token_ids[index] for index in row.path(node)]
        expected = brute[tuple(path)] if len(path) == 2 else brute[path[0]].sum()
        assert tree.score[0, node].exp().item() == pytest.approx(expected.item(), rel=1e-4)
