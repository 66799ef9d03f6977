"""Provisional text is offered as it was sampled, and only where it continues a verdict."""

import numpy as np
import pytest
from helpers.remote import mixed, sequence_tree, tensors

from inference.draft_tree import ROOT
from inference.remote.integer_distribution import TOTAL
from inference.remote.provisional import (
    SUPPORT,
    ProvisionalText,
    ProvisionalToken,
    sampled_token,
)
from inference.remote.step_frame import decode_step, encode_step

TOKENS = [
    ProvisionalToken(4, (4, 5), (TOTAL - 8, 8)),
    ProvisionalToken(6),
    ProvisionalToken(2, (1, 2, 3), (1, TOTAL - 2, 1)),
]
TEXT = ProvisionalText([7, 8], TOKENS)


@pytest.mark.parametrize(
    ("emitted", "rest"),
    [
        ([7, 8, 4], TOKENS[1:]),
        ([7, 8, 4, 6], TOKENS[2:]),
        ([7, 8, 4, 6, 2], []),
        ([7, 8, 4, 6, 2, 9], []),
        ([7, 8, 5], []),  # the target's token after the guess is another one
        ([7, 9], []),  # the guess was wrong
        ([7, 8], []),
        ([7], []),
    ],
)
def test_only_what_continues_a_verdict_survives(
    emitted: list[int], rest: list[ProvisionalToken]
) -> None:
    found = TEXT.after(emitted)
    assert (found.guess, found.written) == ([], rest)


def test_without_a_submitted_tree_all_tokens_may_survive() -> None:
    assert ProvisionalText(written=TOKENS).after([4]).written == TOKENS[1:]


def test_a_chain_keeps_the_distributions_of_its_tokens() -> None:
    chain = ProvisionalText(written=TOKENS).chain(longest=9)
    assert [chain.token_ids[node] for node in chain.best_path()] == [4, 6, 2]
    assert chain.parent == [ROOT, 0, 1]
    assert (chain.sampled, chain.deterministic) == ({ROOT: [0], 1: [2]}, {0: [1]})
    for parent, token in ((ROOT, TOKENS[0]), (1, TOKENS[2])):
        ids, probs = chain.draft_distribution(parent)
        expected = dict(zip(token.ids, token.weights, strict=True))
        found = {i: p * TOTAL for i, p in zip(ids.tolist(), probs.tolist(), strict=True) if p}
        assert found == expected
    received = decode_step(encode_step(3, 1, chain).body).tree
    assert received.parents.tolist() == [-1, 0, 1]
    assert received.weights.sum(axis=1).tolist() == [TOTAL, TOTAL]


def test_the_guess_is_the_best_path_down_to_a_leaf() -> None:
    assert sequence_tree(mixed()).best_path() == [0, 2]
    tree = sequence_tree(tensors([3, 5, 2, 4], [ROOT, ROOT, 0, 1]))
    tree.rank[:] = [2, 0, 3, 1]
    assert tree.best_path() == [1, 3]
    assert sequence_tree(tensors([], [])).best_path() == []


def test_a_token_is_sampled_from_the_most_likely_ones_after_rounding() -> None:
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(100))
    ids = np.arange(100) + 7
    token = sampled_token(ids, probs, random)
    assert len(token.ids) == SUPPORT
    assert sum(token.weights) == TOTAL
    assert set(token.ids) == set(ids[np.argsort(-probs)[:SUPPORT]].tolist())
    counts = dict.fromkeys(token.ids, 0)
    for _ in range(4000):
        counts[sampled_token(ids, probs, random).token_id] += 1
    shares = np.array(list(counts.values())) / 4000
    assert np.abs(shares - np.array(token.weights) / TOTAL).max() < 0.03
