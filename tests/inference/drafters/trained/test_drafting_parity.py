"""Training and decoding see the same drafter: a masked pass equals cached, stepwise drafting."""

from typing import Any

import pytest
import torch
from helpers.drafting import (
    assert_training_equals_drafting,
    assert_tree_equals_paths,
    committed,
    prefilled,
)
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import BRANCH, FEEDBACK, GRID, HYBRID, NO_FIRST, VARIANTS
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.drafters.trained.drafter import TrainedDrafter, TrainedSession
from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.generation.preparation import prepare_requests
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import chain_step


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_masked_training_pass_equals_cached_drafting_at_every_depth(name: str) -> None:
    target = TargetAdapter(tiny_llama())
    assert_training_equals_drafting(target, tiny_drafter(target, VARIANTS[name]), 7, depth=4)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", GRID)
@torch.no_grad()
def test_training_equals_drafting_for_all_that_is_offered(name: str, length: int) -> None:
    target = TargetAdapter(tiny_llama())
    assert_training_equals_drafting(target, tiny_drafter(target, GRID[name]), length, depth=5)


FIRST = {
    "moa": tiny_settings(trunk=NO_FIRST),
    "feedback": tiny_settings(combine="sum", trunk=FEEDBACK | NO_FIRST),
    "hybrid": tiny_settings(trunk=HYBRID | NO_FIRST),
    "tail": tiny_settings(combine="sum", parallel_levels=0, tail_layers=2, trunk=NO_FIRST),
    "hybrid-tail": VARIANTS["hybrid-tail-1-no-first"],
    "hybrid-two-layers": VARIANTS["hybrid-two-layers-no-first"],
}


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", FIRST)
@torch.no_grad()
def test_training_equals_drafting_without_the_first_position(name: str, length: int) -> None:
    target = TargetAdapter(tiny_llama())
    assert_training_equals_drafting(target, tiny_drafter(target, FIRST[name]), length, depth=4)


@pytest.mark.parametrize("attends_first", [False, True])
@pytest.mark.parametrize("name", FIRST)
@torch.no_grad()
def test_the_self_attention_row_of_the_first_token_is_drafted_from_only_if_wanted(
    name: str, attends_first: bool
) -> None:
    length = 6
    settings = FIRST[name]
    trunk = settings.trunk.model_copy(update={"first_position": attends_first})
    settings = settings.model_copy(update={"trunk": trunk})
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target, settings), target, _shape_of(settings))
    tokens = torch.randint(0, 61, (1, length + 1))
    session, _ = prefilled(drafter, tokens, length)
    before = session.propose(Budget(8), StepRandom())
    for layer in session.cache.layers:
        for rows in layer.prefix(length):
            rows[:, :, 0] += 1.0
    after = session.propose(Budget(8), StepRandom())
    is_same = torch.equal(before.score, after.score)
    assert is_same is not attends_first


TREES = {
    "moa-A3-P1": (3, tiny_settings(parallel_levels=1)),
    "moa-A2-P2": (2, tiny_settings(parallel_levels=2)),
    "moa-A1-P3": (1, tiny_settings(parallel_levels=3)),
    "tail-1": (3, tiny_settings(combine="sum", parallel_levels=0, tail_layers=1)),
    "tail-2": (3, tiny_settings(combine="sum", parallel_levels=0, tail_layers=2)),
    "feedback-A3-P1": (3, tiny_settings(trunk=FEEDBACK)),
    "feedback-A2-P2": (2, tiny_settings(combine="sum", parallel_levels=2, trunk=FEEDBACK)),
    "hybrid-A2-P2": (2, VARIANTS["hybrid-mixture-P2"]),
    "hybrid-tail-1": (3, VARIANTS["hybrid-tail-1"]),
    "hybrid-tail-1-no-first": (3, VARIANTS["hybrid-tail-1-no-first"]),
    "chimera-A3-P2": (3, VARIANTS["chimera"]),
    # Siblings do not see each other, and a parallel level reads the path of its true ancestors.
    "branch-heads-A1-P2": (1, tiny_settings(1, parallel_levels=2, trunk=FEEDBACK, **BRANCH)),
    "gumiho-A2-P5": (2, VARIANTS["gumiho"]),
    "parallel-spec-A1-P3": (1, VARIANTS["parallel-spec"]),
    "hidden-transfer-A1-P3": (1, VARIANTS["hidden-transfer"]),
    "hidden-transfer-A2-P3": (2, VARIANTS["hidden-transfer"]),
    "tensor-A1-P3": (1, VARIANTS["tensor"]),
    "no-layer-A2-P2": (2, VARIANTS["hybrid-no-layer"]),
    "masks-A2-P2": (2, VARIANTS["hybrid-masks-two-layers-no-first"]),
    "moa-three-layers-A3-P1": (3, VARIANTS["moa-three-layers"]),
    "branch-heads-A2-P2": (2, VARIANTS["hybrid-branch-heads"]),
    **{f"{name}-A1-P3": (1, VARIANTS[name]) for name in VARIANTS if name.startswith("block")},
    "masks-path-A2-P3": (2, VARIANTS["masks-path"]),
    "masks-recurrent-A2-P2": (2, VARIANTS["masks-recurrent"]),
    "path-A2-P2": (2, VARIANTS["moa-path-E4-few-tokens"]),
    "gumiho-path-A2-P5": (2, VARIANTS["gumiho-path"]),
}


@pytest.mark.parametrize("name", TREES)
@torch.no_grad()
def test_a_tree_step_equals_one_linear_pass_per_path(name: str) -> None:
    passes, settings = TREES[name]
    target = TargetAdapter(tiny_llama())
    assert_tree_equals_paths(target, tiny_drafter(target, settings), 8, passes)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
@torch.no_grad()
def test_trees_equal_paths_for_all_that_is_offered(name: str) -> None:
    target = TargetAdapter(tiny_llama())
    assert_tree_equals_paths(target, tiny_drafter(target, GRID[name]), 8, passes=3)


SESSIONS = {
    "kv": tiny_settings(),
    "hidden": tiny_settings(source="hidden", layers=(3, 1)),
    "tail-2": tiny_settings(combine="sum", parallel_levels=0, tail_layers=2),
    "feedback": tiny_settings(trunk=FEEDBACK),
    "feedback-fused": tiny_settings(trunk=FEEDBACK | {"fusion_layers": (0, 2)}),
    "hybrid-P2": VARIANTS["hybrid-mixture-P2"],
    "hybrid-tail-1": VARIANTS["hybrid-tail-1"],
    "hybrid-no-first": tiny_settings(trunk=HYBRID | NO_FIRST),
    "draft-vocabulary": tiny_settings(draft_vocab_size=7),
    "chimera": VARIANTS["chimera"],
    "branch-heads": VARIANTS["hybrid-branch-heads"],
    "gumiho": VARIANTS["gumiho"],
    "parallel-spec": VARIANTS["parallel-spec"],
    "tensor": VARIANTS["tensor"],
    "hidden-transfer": VARIANTS["hidden-transfer"],
    "two-layers-no-first": VARIANTS["hybrid-two-layers-no-first"],
    "block-recurrent": VARIANTS["block-recurrent"].model_copy(update={"draft_vocab_size": 7}),
    "block-dspark": VARIANTS["block-dspark"].model_copy(update={"draft_vocab_size": 7}),
    "block-mixture": VARIANTS["block-mixture-E2"],
    "masks-path": VARIANTS["masks-path"],
}


def _shape_of(settings: DrafterSettings) -> TreeShape:
    return TreeShape(parallel_levels=settings.schedule.parallel_levels)


@pytest.mark.parametrize("name", SESSIONS)
def test_rows_projected_after_accept_equal_rows_of_a_fresh_prefill(name: str) -> None:
    _assert_rows_equal_fresh_ones(SESSIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_rows_after_accept_equal_fresh_ones_for_all_that_is_offered(name: str) -> None:
    _assert_rows_equal_fresh_ones(GRID[name])


@torch.no_grad()
def _assert_rows_equal_fresh_ones(settings: DrafterSettings) -> None:
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target, settings), target, _shape_of(settings))
    tokens = torch.randint(0, 61, (1, 15))
    session, output = prefilled(drafter, tokens, 8)
    session.propose(
        Budget(8), StepRandom()
    )  # leaves keys and values of drafts, which must not matter
    more = target.forward(chain_step(tokens[:, 8:12], 8), output.cache)
    session.advance(committed(tokens, 8, 12, drafter.encode_memory(more, torch.arange(4)[None])))
    fresh, _ = prefilled(drafter, tokens, 12)
    for kept, new in zip(_kept(session), _kept(fresh), strict=True):
        for got, expected in zip(kept, new, strict=True):
            close = {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(got[:, :, :12], expected[:, :, :12], **close)
    again, expected_tree = (
        session.propose(Budget(8), StepRandom()),
        fresh.propose(Budget(8), StepRandom()),
    )
    assert torch.equal(again.token_ids, expected_tree.token_ids)


def _kept(session: TrainedSession) -> list[tuple[Tensor, ...]]:
    """Return all tensors that a session keeps for its tokens."""
    rows = session.cache
    tail = [] if rows.tail_cache is None else rows.tail_cache.slot_layers
    buffers = [part.prefix(12) for part in rows.buffers]
    return [*buffers, *((each.keys, each.values) for each in tail)]


@pytest.mark.parametrize("name", SESSIONS)
@torch.no_grad()
def test_the_engine_drafts_from_what_was_emitted_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = tiny_llama(vocab=11)
    target, settings = TargetAdapter(model), SESSIONS[name]
    drafter = TrainedDrafter(tiny_drafter(target, settings), target, _shape_of(settings))
    requests, _ = prepare_requests(
        model, [[1, 2, 3], [4, 5, 6, 7, 8]], {"max_new_tokens": 12}, seed=0, max_position=128
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
            session, _ = prefilled(drafter, torch.tensor([ids]), len(ids) - 1)
            fresh = session.propose(Budget(drafter.max_nodes), StepRandom())
            assert tree.token_ids[row].tolist() == fresh.token_ids[0].tolist()
            torch.testing.assert_close(tree.score[row], fresh.score[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_advancing_twice_changes_nothing_and_a_gap_is_refused() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(tiny_drafter(target), target, TreeShape())
    tokens = torch.randint(0, 61, (1, 12))
    session, output = prefilled(drafter, tokens, 8)
    memory = drafter.encode_memory(output, torch.arange(8)[None])
    before = session.propose(Budget(8), StepRandom())
    session.advance(committed(tokens, 0, 8, memory))
    assert torch.equal(session.propose(Budget(8), StepRandom()).token_ids, before.token_ids)
    with pytest.raises(ValueError, match="session ends at"):
        session.advance(committed(tokens, 9, 11, memory))
