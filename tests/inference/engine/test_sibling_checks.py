"""Checking all children of a node at once gives the same results as checking them one by one.

Sampled children are checked by recursive rejection sampling, and deterministic children as point
masses.
"""

import pytest
import torch
from helpers.random_trees import RandomTrees, joined

from inference.draft_tree import ROOT
from inference.engine.accept import candidate_checks
from inference.engine.sibling_checks import check_siblings
from inference.engine.siblings import ChildTable, Siblings
from inference.engine.support import RecordedDistribution, Support


def random_support(
    batch: int, sampled_share: float, drafted: int = 5, is_recorded: bool = True
) -> tuple[Support, Siblings]:
    """Return the probabilities after the roots of random trees, and the children of the roots."""
    source = RandomTrees(drafted=drafted, sampled_share=sampled_share)
    tree = joined([source.tree(seed) for seed in range(batch)])
    probs = torch.stack([source.target_probs(seed)[0] for seed in range(batch)])
    siblings = ChildTable(tree, source.vocab).under(torch.full((batch,), ROOT))
    assert tree.draft_probs is not None
    ids, draft_probs = tree.draft_probs.ids[:, 0], tree.draft_probs.probs[:, 0]
    recorded = RecordedDistribution(ids, draft_probs) if is_recorded else None
    return Support.of(probs, siblings.token, recorded), siblings


BATCH = 60


@pytest.mark.parametrize("sampled_share", [0.0, 0.5, 1.0])
def test_every_check_is_that_of_the_one_by_one_rule(sampled_share: float) -> None:
    source = RandomTrees(sampled_share=sampled_share)
    support, siblings = random_support(BATCH, sampled_share)
    checks = check_siblings(support, siblings)
    num_compared = 0
    for index in range(BATCH):
        probs = source.target_probs(index)[0]
        own = source.tree(index).sequence_tree()
        residual = probs.clone()
        for order, expected in enumerate(candidate_checks(own, ROOT, probs)):
            if expected.accept_prob > 1 - 1e-12:  # the residual is rounding error
                break
            got = checks.accept_prob[index, order].item()
            assert siblings.node[index, order] == expected.node
            assert got == pytest.approx(expected.accept_prob, abs=1e-12)
            residual = expected.residual
            num_compared += 1
        else:
            after = probs.clone()
            after[support.ids[index]] = checks.residual[index][support.column[index]]
            torch.testing.assert_close(after / after.sum(), residual, rtol=0, atol=1e-12)
    assert num_compared > BATCH


def test_a_residual_without_mass_stays_as_it_was() -> None:
    support, siblings = random_support(BATCH, sampled_share=0.0, is_recorded=False)
    is_first = support.column[:, :1] == torch.arange(support.ids.shape[1])
    certain = support._replace(target=is_first.double(), outside=support.outside * 0)
    checks = check_siblings(certain, siblings)
    has_children = siblings.is_valid[:, 0]
    assert checks.accept_prob[has_children, 0].tolist() == [1.0] * int(has_children.sum())
    torch.testing.assert_close(checks.residual, certain.target)


@pytest.mark.parametrize("wrong", [0.0, torch.nan])
def test_children_that_could_not_have_been_sampled_are_marked(wrong: float) -> None:
    support, siblings = random_support(BATCH, sampled_share=0.5)
    assert support.draft is not None
    invalid = support._replace(draft=torch.full_like(support.draft, wrong))
    is_possible = check_siblings(invalid, siblings).is_possible[siblings.is_valid]
    assert is_possible.tolist() == (~siblings.is_sampled[siblings.is_valid]).tolist()
    assert bool(check_siblings(support, siblings).is_possible[siblings.is_valid].all())
