"""Exact enumeration: tokens of batched acceptance have the target's distribution."""

from dataclasses import replace

import pytest
import torch
from helpers.batched_acceptance import batched
from helpers.tables import Tables, Tamper, no_processors, two_step_error
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from inference.draft_tree import CandidateKind, DraftTree, SparseDistribution
from inference.engine import siblings
from inference.sampling.options import Sampling
from inference.trees import builder
from inference.trees.shape import TreeShape

EXACT = 1e-9
CLEARLY_WRONG = 1e-3
ONE_LEVEL = TreeShape(
    autoregressive_levels=1, parallel_levels=0, children=3, breadth=1, sampled=True
)
TWO_LEVELS = ONE_LEVEL.model_copy(update={"autoregressive_levels": 2, "children": 2})
DETERMINISTIC = TWO_LEVELS.model_copy(update={"sampled": False, "breadth": 2, "num_nodes": 6})
TABLES = Tables(vocab=4, components=2, seed=7)
PROCESSED = Sampling(
    LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)]), do_sample=True
)


def _error(shape: TreeShape, change: Tamper) -> float:
    """Return the error of two decoding steps with batched acceptance."""
    return two_step_error(TABLES, shape, no_processors(), change, length=2, acceptance=batched)


def _unchanged(tree: DraftTree) -> DraftTree:
    return tree


def _mixed(tree: DraftTree) -> DraftTree:
    """Make the last sampled child of each node a deterministic candidate with a fixed token."""
    is_last = tree.rank == tree.max_siblings - 1
    return replace(
        tree,
        token_ids=torch.where(is_last, 2, tree.token_ids),
        kind=torch.where(is_last, int(CandidateKind.DETERMINISTIC), tree.kind),
    )


@pytest.mark.parametrize(
    ("drafted", "change"),
    [(2, _unchanged), (2, _mixed), (3, _mixed), (256, _unchanged)],
    ids=["2 sampled", "2 mixed", "3 mixed", "all sampled"],
)
def test_trees_below_few_recorded_ids_keep_the_target_distribution(
    change: Tamper, drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "DISTRIBUTION_SIZE", drafted)
    assert _error(ONE_LEVEL.model_copy(update={"children": 2}), change) < EXACT
    assert _error(ONE_LEVEL, change) < EXACT


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        (TWO_LEVELS, PROCESSED),
        (DETERMINISTIC, no_processors()),
        pytest.param(TWO_LEVELS, no_processors(), marks=pytest.mark.slow),
    ],
    ids=["sampled", "deterministic", "sampled raw"],
)
def test_trees_of_two_levels_keep_the_target_distribution(
    shape: TreeShape, sampling: Sampling
) -> None:
    tables = Tables(vocab=3, components=2, seed=8)
    assert two_step_error(tables, shape, sampling, length=2, acceptance=batched) < EXACT


# Planted faults: the enumeration must detect each of them.


def _not_renormalized(columns: Tensor, log_probs: Tensor) -> SparseDistribution:
    return SparseDistribution(columns, log_probs.exp())


def test_a_cut_draft_distribution_that_is_not_renormalized_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "DISTRIBUTION_SIZE", 2)
    monkeypatch.setattr(builder, "_distribution", _not_renormalized)
    assert _error(ONE_LEVEL, _unchanged) > CLEARLY_WRONG


def test_an_id_that_counts_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_without_repeats", lambda values, column: values)
    assert _error(ONE_LEVEL, _mixed) > CLEARLY_WRONG


def test_a_residual_without_the_other_ids_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(probs: Tensor, ids: Tensor) -> Tensor:
        return probs.new_zeros(len(probs))

    monkeypatch.setattr(builder, "DISTRIBUTION_SIZE", 2)
    monkeypatch.setattr(siblings, "outside_mass", nothing)
    assert _error(ONE_LEVEL, _unchanged) > CLEARLY_WRONG


def test_a_draft_distribution_with_rejected_candidates_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_recorded(recorded: Tensor, is_token: Tensor, is_sampled: Tensor) -> Tensor:
        return torch.where(is_sampled, recorded[:, None], is_token.double())

    monkeypatch.setattr(siblings, "_draft_distributions", as_recorded)
    assert _error(ONE_LEVEL, _unchanged) > CLEARLY_WRONG
