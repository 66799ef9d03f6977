"""Training and decoding see the same drafter: a masked pass equals cached, stepwise drafting."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import one_document
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
from jakiro.config import DrafterSettings
from jakiro.drafter import JakiroDrafter
from jakiro.experts import BankOutput
from jakiro.mixture import posterior_log_weights
from jakiro.target import StepOutput, TargetAdapter, chain_step
from training.anchors import rollout_anchors
from training.drafting import draft_all_positions, through_tail
from training.target_reader import TargetReader

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)
FEEDBACK = {"kind": "feedback"}
VARIANTS = {
    "E2-mixture-P2": tiny_settings(parallel_levels=2),
    "E2-sum-P1": tiny_settings(combine="sum"),
    "E4-sum-P2-no-contrast": tiny_settings(
        num_experts=4, combine="sum", parallel_levels=2, contrastive_head=False
    ),
    "E1-P1": tiny_settings(num_experts=1),
    "kv-subset-projected": tiny_settings(layers=(0, 2), common_width=12),
    "hidden": tiny_settings(source="hidden"),
    "last-feature": tiny_settings(source="hidden", layer_attention=False),
    "hidden-unordered": tiny_settings(source="hidden", layers=(3, 1), layer_attention=False),
    "hidden-projected": tiny_settings(source="hidden", layers=(0, 2), common_width=12),
    "kv-side-by-side": tiny_settings(layers=(2, 0), layer_attention=False),
    "anchor": tiny_settings(trunk={"reads_anchor": True}, parallel_levels=2),
    "anchor-hidden-tail": tiny_settings(
        combine="sum",
        parallel_levels=0,
        tail_layers=1,
        trunk={"reads_anchor": True},
        source="hidden",
    ),
    "tail-1": tiny_settings(combine="sum", parallel_levels=0, tail_layers=1),
    "tail-2-E1": tiny_settings(1, "sum", parallel_levels=0, tail_layers=2),
    "draft-vocabulary": tiny_settings(draft_vocab_size=23, parallel_levels=2),
    "feedback-E1-P0": tiny_settings(1, parallel_levels=0, trunk=FEEDBACK),
    "feedback-sum-P1": tiny_settings(combine="sum", trunk=FEEDBACK | {"input_norms": False}),
    "feedback-mixture-P2": tiny_settings(parallel_levels=2, trunk=FEEDBACK),
    "feedback-fused": tiny_settings(trunk=FEEDBACK | {"fusion_layers": (1, 2, 3)}),
}


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


def _trained(
    target: TargetAdapter, model: JakiroDrafter, tokens: Tensor, length: int, depth: int
) -> list[BankOutput]:
    """What training predicts at distances 1..depth from the last verified token, at length - 1."""
    index = torch.arange(tokens.shape[1])
    if model.config.settings.trunk.kind == "feedback":
        starts = np.zeros(tokens.shape[1], np.int64)
        several = [torch.from_numpy(rollout_anchors(starts, 1 + draw)) for draw in range(depth)]
        anchors = torch.stack(several)
    else:  # one pass has all distances: position length + d - 1 is d away from its anchor
        anchors = index.clamp(max=length - 1)
    batch = one_document(tokens, anchors)
    reader = TargetReader(target, model, tokens.shape[1], torch.float32)
    view = reader.view(batch)
    outputs = list(draft_all_positions(model, view, batch))
    if reader.tail is not None:
        outputs = [through_tail(outputs[0], reader.tail, view, batch, 0)]
    return outputs if len(outputs) > 1 else outputs * depth


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_masked_training_pass_equals_cached_drafting_at_every_depth(name: str) -> None:
    settings = VARIANTS[name]
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, settings)
    parallel = settings.schedule.parallel_levels
    depth, length = 4, 7
    tokens = torch.randint(0, 61, (1, length + depth + parallel))
    trained = _trained(target, model, tokens, length, depth)

    shape = TreeShape(autoregressive_levels=depth, parallel_levels=parallel, breadth=1)
    drafter = TrainedDrafter(model, target, shape)
    source = _prefilled(drafter, tokens, length)[0].start_tree()
    weights = trained[0].log_weights
    for step in range(1, depth + parallel + 1):
        frontier = None
        if step > 1:
            token = tokens[:, length + step - 1 : length + step]
            frontier = Frontier(token, torch.zeros_like(token))
        got = source.joint(step, frontier)
        level, pass_ = max(0, step - depth), min(step, depth)
        output, place = trained[pass_ - 1], length + pass_ - 1
        laws = drafter.head.log_probs(output.features[:, place : place + 1, level])
        prior = weights if level else output.log_weights[:, place : place + 1]
        expected = laws + prior.unsqueeze(-1)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        if step >= depth:
            follows = tokens[0, min(length + step, tokens.shape[1] - 1)]
            weights = posterior_log_weights(expected[..., follows], prior)


TREES = {
    "moa-A3-P1": (3, tiny_settings(parallel_levels=1)),
    "moa-A2-P2": (2, tiny_settings(parallel_levels=2)),
    "moa-A1-P3": (1, tiny_settings(parallel_levels=3)),
    "tail-1": (3, tiny_settings(combine="sum", parallel_levels=0, tail_layers=1)),
    "tail-2": (3, tiny_settings(combine="sum", parallel_levels=0, tail_layers=2)),
    "feedback-A3-P1": (3, tiny_settings(trunk=FEEDBACK)),
    "feedback-A2-P2": (2, tiny_settings(combine="sum", parallel_levels=2, trunk=FEEDBACK)),
}


@pytest.mark.parametrize("name", TREES)
@torch.no_grad()
def test_a_tree_step_equals_one_linear_pass_per_path(name: str) -> None:
    passes, settings = TREES[name]
    parallel = settings.schedule.parallel_levels
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, settings)
    levels = {"autoregressive_levels": passes, "parallel_levels": parallel}
    shape = TreeShape(**levels, breadth=3, children=3, num_nodes=99)
    tokens = torch.randint(0, 61, (1, 9))
    session, _ = _prefilled(TrainedDrafter(model, target, shape), tokens, 8)
    tree = session.propose(Budget(99), [])
    row = tree.row()
    assert tree.num_nodes == 3 + 9 * (passes + parallel - 1)
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


SESSIONS = {
    "kv": tiny_settings(),
    "hidden": tiny_settings(source="hidden", layers=(3, 1)),
    "anchor": tiny_settings(trunk={"reads_anchor": True}),
    "tail-2": tiny_settings(combine="sum", parallel_levels=0, tail_layers=2),
    "feedback": tiny_settings(trunk=FEEDBACK),
    "feedback-fused": tiny_settings(trunk=FEEDBACK | {"fusion_layers": (0, 2)}),
    "draft-vocabulary": tiny_settings(draft_vocab_size=7),
}


def _shape_of(settings: DrafterSettings) -> TreeShape:
    return TreeShape(parallel_levels=settings.schedule.parallel_levels)


@pytest.mark.parametrize("name", SESSIONS)
@torch.no_grad()
def test_rows_projected_after_accept_equal_rows_of_a_fresh_prefill(name: str) -> None:
    target, settings = TargetAdapter(tiny_llama()), SESSIONS[name]
    drafter = TrainedDrafter(tiny_drafter(target, settings), target, _shape_of(settings))
    tokens = torch.randint(0, 61, (1, 15))
    session, output = _prefilled(drafter, tokens, 8)
    session.propose(Budget(8), [])  # leaves drafted rows behind, which must not matter
    more = target.forward(chain_step(tokens[:, 8:12], 8), output.cache)
    session.advance(_committed(tokens, 8, 12, drafter.encode(more, torch.arange(4)[None])))
    fresh, _ = _prefilled(drafter, tokens, 12)
    for kept, new in zip(_kept(session), _kept(fresh), strict=True):
        for got, expected in zip(kept, new, strict=True):
            close = {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(got[:, :, :12], expected[:, :, :12], **close)
    again, expected_tree = session.propose(Budget(8), []), fresh.propose(Budget(8), [])
    assert torch.equal(again.token_ids, expected_tree.token_ids)


def _kept(session: TrainedSession) -> list[tuple[Tensor, ...]]:
    """Everything that a session keeps of tokens."""
    rows = session.rows
    tail = [] if rows.tail_cache is None else rows.tail_cache.slot_layers
    return [rows.own.prefix(12), rows.memory.prefix(12), *((one.keys, one.values) for one in tail)]


@pytest.mark.parametrize("name", SESSIONS)
@torch.no_grad()
def test_the_engine_drafts_from_what_was_emitted_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = tiny_llama(vocab=11)
    target, settings = TargetAdapter(model), SESSIONS[name]
    drafter = TrainedDrafter(tiny_drafter(target, settings), target, _shape_of(settings))
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
