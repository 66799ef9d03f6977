"""A path that is written token by token is that of a tree with a single path of the same length."""

from typing import Any

import pytest
import torch
from helpers.drafting import prefilled, score_of_path
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from inference.drafters.trained.chain import TrainedChain
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

LENGTH, LONGEST = 9, 40
KINDS: dict[str, dict[str, Any]] = {
    "moa": {},
    "moa of hidden states": {"source": "hidden"},
    "feedback": {"trunk": {"kind": "feedback"}, "parallel_levels": 0},
    "fused feedback": {"trunk": {"kind": "feedback", "fusion_layers": (0, 2)}},
    "trigrams": {"trunk": {"kind": "feedback", "tokens": "trigram"}},
    "two layers": {"trunk": {"kind": "feedback", "num_layers": 2}},
    "hybrid": {"trunk": {"kind": "hybrid"}},
    "sparse experts": {"num_experts": 4, "active_experts": 1},
    "some tokens": {"draft_vocab_size": 16},
    "three parallel levels": {"parallel_levels": 3},
    "summed experts": {"combine": "sum"},
    "block": {
        "trunk": {"kind": "block"},
        "source": "hidden",
        "parallel_heads": "masks",
        "autoregressive_levels": 1,
        "path": "embedding",
    },
    "own head": {"trunk": {"kind": "feedback"}, "head": "own"},
}


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    return TargetAdapter(tiny_llama(max_position_embeddings=512))


def _drafter(target: TargetAdapter, kind: str, length: int) -> TrainedDrafter:
    # `model_construct` skips the limit of depth.
    path = TreeShape.model_construct(
        autoregressive_levels=length, parallel_levels=0, children=1, breadth=1, num_nodes=length
    )
    return TrainedDrafter(tiny_drafter(target, tiny_settings(**KINDS[kind])), target, path)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_is_as_long_as_it_has_to_be(target: TargetAdapter, kind: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (1, LENGTH + 1))
    drafter = _drafter(target, kind, LONGEST)
    session, _ = prefilled(drafter, tokens, LENGTH)
    session.reserve(LENGTH + LONGEST)
    tree = session.propose(Budget(LONGEST, LONGEST), StepRandom()).sequence_tree()
    expected = [tree.token_ids[node] for node in tree.best_path()]
    assert len(expected) == LONGEST
    session, _ = prefilled(_drafter(target, kind, 1), tokens, LENGTH)
    before = session.propose(Budget(1), StepRandom()).sequence_tree()
    chain, found = TrainedChain(session, LONGEST), list[int]()
    for _ in range(LONGEST):
        own = chain.propose(found, StepRandom()).sequence_tree()
        found.append(own.token_ids[0])
    assert found == expected
    assert session.propose(Budget(1), StepRandom()).sequence_tree().token_ids == before.token_ids


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_were_not_proposed_are_followed(target: TargetAdapter, kind: str) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 16, (1, LENGTH + 1))
    path = torch.randint(0, 16, (7,)).tolist()
    drafter = _drafter(target, kind, len(path) + 1)
    chain = TrainedChain(prefilled(drafter, tokens, LENGTH)[0], len(path) + 1)
    for known in ([], path[:3], path):  # three, and then four tokens at once
        tree = chain.propose(known, StepRandom())
        best = int(tree.token_ids[0, 0])
        source = prefilled(drafter, tokens, LENGTH)[0].start_tree()
        column = best  # the ids of the draft vocabulary are the first ids
        before = score_of_path(prefilled(drafter, tokens, LENGTH)[0].start_tree(), known)
        expected = score_of_path(source, [*known, column]) - before
        assert tree.score[0, 0].item() == pytest.approx(expected, abs=1e-4)
        assert tree.base_length.tolist() == [LENGTH + len(known)]
