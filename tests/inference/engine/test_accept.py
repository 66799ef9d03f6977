"""Exact enumeration: the emitted tokens have the target's distribution."""

from dataclasses import replace

import pytest
import torch
from helpers.tables import Tables, Tamper, no_processors, two_step_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.draft_tree import CandidateKind, DraftTree
from inference.engine import accept
from inference.engine.acceptance import ProcessedDistribution
from inference.protocol import Budget
from inference.sampling.options import Sampling
from inference.trees.shape import TreeShape

EXACT = 1e-9
CLEARLY_WRONG = 1e-3

DETERMINISTIC = TreeShape(
    autoregressive_levels=2, parallel_levels=0, children=3, breadth=2, num_nodes=6
)
SAMPLED = TreeShape(autoregressive_levels=2, parallel_levels=0, children=2, breadth=1, sampled=True)
ONE_LEVEL = SAMPLED.model_copy(update={"autoregressive_levels": 1})
TABLES = Tables(vocab=4, components=2, seed=7)

PROCESSORS = {
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top-k": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)],
    "top-p": [TopPLogitsWarper(0.8)],
    "min-p": [MinPLogitsWarper(0.2)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.7), TopPLogitsWarper(0.9)],
}


def _sampling(name: str) -> Sampling:
    return Sampling(LogitsProcessorList(PROCESSORS[name]), do_sample=True)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    components=st.sampled_from([1, 2, 4]),
    children=st.integers(1, 4),
    breadth=st.integers(1, 3),
    num_nodes=st.integers(1, 9),
    name=st.sampled_from([None, *PROCESSORS]),
)
def test_deterministic_trees_keep_the_target_distribution_over_two_steps(
    seed: int, components: int, children: int, breadth: int, num_nodes: int, name: str | None
) -> None:
    shape = TreeShape(
        autoregressive_levels=2,
        parallel_levels=0,
        children=children,
        breadth=breadth,
        num_nodes=num_nodes,
    )
    sampling = _sampling(name) if name else no_processors()
    tables = Tables(vocab=4, components=components, seed=seed)
    assert two_step_error(tables, shape, sampling) < EXACT


any_sampled_tree = given(
    seed=st.integers(0, 10_000),
    components=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]),
    name=st.sampled_from([None, *PROCESSORS]),
)


def assert_sampled_tree_keeps_the_target_distribution(
    seed: int, components: int, size: tuple[int, int], name: str | None
) -> None:
    """Enumerate two steps with sampled trees; `size` is their number of children and breadth."""
    sampling = _sampling(name) if name else no_processors()
    shape = SAMPLED.model_copy(update={"children": size[0], "breadth": size[1]})
    tables = Tables(vocab=3, components=components, seed=seed)
    assert two_step_error(tables, shape, sampling, length=2) < EXACT


@settings(max_examples=4)
@any_sampled_tree
def test_sampled_trees_keep_the_target_distribution_over_two_steps(
    seed: int, components: int, size: tuple[int, int], name: str | None
) -> None:
    assert_sampled_tree_keeps_the_target_distribution(seed, components, size, name)


@pytest.mark.slow
@settings(max_examples=48)
@any_sampled_tree
def test_many_sampled_trees_keep_the_target_distribution_over_two_steps(
    seed: int, components: int, size: tuple[int, int], name: str | None
) -> None:
    assert_sampled_tree_keeps_the_target_distribution(seed, components, size, name)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("shape", [DETERMINISTIC, SAMPLED], ids=["deterministic", "sampled"])
def test_every_processor_keeps_the_target_distribution(shape: TreeShape, name: str) -> None:
    tables = Tables(vocab=4 if shape is DETERMINISTIC else 3, components=2, seed=8)
    assert two_step_error(tables, shape, _sampling(name), length=2) < EXACT


@pytest.mark.parametrize("budget", [Budget(1, 1), Budget(2, 2), Budget(3), Budget(4, 2)])
def test_trees_cut_to_a_budget_keep_the_target_distribution(budget: Budget) -> None:
    generous = SAMPLED.model_copy(update={"children": 3, "breadth": 2})
    cut = generous.within(budget)
    assert cut is not None
    assert cut.max_nodes <= budget.num_nodes
    tables = Tables(vocab=3, components=2, seed=4)
    assert two_step_error(tables, cut, no_processors(), length=2) < EXACT


@pytest.mark.parametrize("shape", [DETERMINISTIC, SAMPLED], ids=["deterministic", "sampled"])
def test_trees_limited_in_depth_keep_the_target_distribution(
    shape: TreeShape,
) -> None:
    tables = Tables(vocab=3, components=2, seed=4)

    def limited(tree: DraftTree) -> DraftTree:
        return tree.limited(int(tree.base_length[0]) + 1)

    assert two_step_error(tables, shape, no_processors(), limited, length=2) < EXACT


def test_pruning_sampled_candidates_by_score_is_caught() -> None:
    def pruned(tree: DraftTree) -> DraftTree:
        best = tree.score.argmax(dim=1, keepdim=True)
        is_best = torch.zeros_like(tree.is_valid).scatter_(1, best, True)
        return replace(tree, is_valid=is_best)

    error = two_step_error(TABLES, ONE_LEVEL, no_processors(), pruned, length=2)
    assert error > CLEARLY_WRONG


def test_a_processor_that_sees_another_path_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_drafts(distribution: ProcessedDistribution, node: int) -> Tensor:
        return torch.tensor([distribution.emitted])

    monkeypatch.setattr(ProcessedDistribution, "_prefix", without_drafts)
    error = two_step_error(TABLES, DETERMINISTIC, _sampling("repetition penalty"))
    assert error > CLEARLY_WRONG


def test_greedy_decoding_is_a_point_mass_on_the_best_tokens() -> None:
    sampling = no_processors(do_sample=False)
    assert two_step_error(TABLES, DETERMINISTIC, sampling) < EXACT


def _as_mixed(tree: DraftTree) -> DraftTree:
    """Make the last sampled child of each node a deterministic candidate with a fixed token."""
    fixed = torch.full_like(tree.token_ids, 2)
    is_last = tree.rank == 1
    return replace(
        tree,
        token_ids=torch.where(is_last, fixed, tree.token_ids),
        kind=torch.where(is_last, int(CandidateKind.DETERMINISTIC), tree.kind),
    )


def test_a_deterministic_candidate_beside_sampled_ones_keeps_the_target_distribution() -> None:
    assert two_step_error(TABLES, ONE_LEVEL, no_processors(), _as_mixed, length=2) < EXACT


# Planted faults: the enumeration must detect each of them.


def _most_likely_instead_of_sampled(tree: DraftTree) -> DraftTree:
    """Replace samples by the likeliest candidates (total variation of the output .28 to .40)."""
    assert tree.draft_probs is not None
    best = tree.draft_probs.ids[0, tree.parent[0] + 1, tree.rank[0]]
    return replace(tree, token_ids=best[None])


def _sorted_siblings(tree: DraftTree) -> DraftTree:
    order = torch.zeros_like(tree.rank)
    for node in range(tree.num_nodes):
        siblings = tree.parent[0] == tree.parent[0, node]
        order[0, node] = (tree.score[0][siblings] > tree.score[0, node]).sum()
    return replace(tree, rank=order)


def _pruned_after_sampling(tree: DraftTree) -> DraftTree:
    return replace(tree, is_valid=tree.is_valid & (tree.score > tree.score.median()))


@pytest.mark.parametrize(
    "fault",
    [_most_likely_instead_of_sampled, _sorted_siblings, _pruned_after_sampling],
    ids=lambda fault: fault.__name__,
)
def test_a_tampered_sampled_tree_is_caught(fault: Tamper) -> None:
    error = two_step_error(TABLES, ONE_LEVEL, no_processors(), fault, length=2)
    assert error > CLEARLY_WRONG


def test_a_missing_renormalization_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnormalized(weights: Tensor, otherwise: Tensor) -> Tensor:
        return weights

    monkeypatch.setattr(accept, "_renormalized", unnormalized)
    assert two_step_error(TABLES, DETERMINISTIC, no_processors()) > CLEARLY_WRONG


def test_a_residual_that_forgets_rejected_candidates_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = accept.candidate_checks

    def forgetful(tree: accept.SequenceTree, parent: int, target_probs: Tensor) -> object:
        for check in original(tree, parent, target_probs):
            yield check._replace(residual=target_probs)

    monkeypatch.setattr(accept, "candidate_checks", forgetful)
    assert two_step_error(TABLES, DETERMINISTIC, no_processors()) > CLEARLY_WRONG


def test_a_bonus_token_from_the_raw_softmax_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = accept.accept_path

    def careless(
        tree: accept.SequenceTree, target_probs: object, decide: object
    ) -> accept.AcceptedPath:
        path, next_probs = original(tree, target_probs, decide)  # type: ignore[arg-type]
        softer = next_probs.pow(0.6)  # undoes the sharpening by temperature 0.6
        return accept.AcceptedPath(path, softer / softer.sum())

    monkeypatch.setattr(accept, "accept_path", careless)
    assert two_step_error(TABLES, DETERMINISTIC, _sampling("temperature")) > CLEARLY_WRONG


def test_duplicate_siblings_among_sampled_candidates_are_caught() -> None:
    def duplicated(tree: DraftTree) -> DraftTree:
        first = tree.token_ids[:, :1].expand(-1, 2)
        return replace(tree, token_ids=torch.cat((first, tree.token_ids[:, 2:]), dim=1))

    with pytest.raises(ValueError, match="probability zero in the drafter's draft_probs"):
        two_step_error(TABLES, ONE_LEVEL, no_processors(), duplicated)


def test_sampled_candidates_without_draft_probs_are_refused() -> None:
    def without_draft_probs(tree: DraftTree) -> DraftTree:
        return replace(tree, draft_probs=None)

    with pytest.raises(ValueError, match="come without draft_probs"):
        two_step_error(TABLES, SAMPLED, no_processors(), without_draft_probs)
