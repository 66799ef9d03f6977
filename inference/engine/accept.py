"""Lossless acceptance in the tree of one sequence; `accept_batched` implements the same rules.

There is one rule for sampled candidates and one for deterministic candidates. Both rules are exact,
even if candidates of both kinds have the same parent. Here p is the target's processed distribution
after the parent, and q is the draft distribution there:

- Sampled candidates are checked in the order of sampling, by recursive rejection sampling without
  replacement (arXiv 2402.14160; the idea of several candidates is from 2305.09781): accept c with
  probability min(1, p(c) / q(c)); otherwise set p to norm(max(p - q, 0)), remove c from q, and
  renormalize q.
- Deterministic candidates are treated as point masses: accept c with probability p(c); otherwise
  remove c from p and renormalize p.

After all candidates under a parent were rejected, p is the residual distribution, from which the
next token is sampled.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import ROOT, SequenceTree
from jakiro.errors import DraftError

TargetProbs = Callable[[int], Float[Tensor, " vocab"]]


class CandidateCheck(NamedTuple):
    """The check of one candidate.

    Attributes:
        node: node of the candidate.
        accept_prob: probability of accepting the candidate.
        residual: residual distribution if the candidate is rejected.
    """

    node: int
    accept_prob: float
    residual: Float[Tensor, " vocab"]


class AcceptedPath(NamedTuple):
    """The accepted nodes, from the first level down, and the distribution of the next token."""

    path: list[int]
    next_probs: Float[Tensor, " vocab"]


def accept_path(
    tree: SequenceTree, target_probs: TargetProbs, decide: Callable[[float], bool]
) -> AcceptedPath:
    """Return the accepted path and the distribution of the next token.

    Args:
        tree: tree of one sequence.
        target_probs: function that returns the target's processed distribution after a node (or
            ROOT); it is called for visited nodes only.
        decide: function that returns True with the given probability.

    Raises:
        DraftError: a checked sampled candidate has probability zero in the draft distribution.
    """
    node = ROOT
    path: list[int] = []
    while True:
        residual = target_probs(node)
        for check in candidate_checks(tree, node, residual):
            if decide(check.accept_prob):
                node = check.node
                path.append(node)
                break
            residual = check.residual
        else:
            return AcceptedPath(path, residual)


def candidate_checks(
    tree: SequenceTree, parent: int, target_probs: Float[Tensor, " vocab"]
) -> Iterator[CandidateCheck]:
    """Yield the checks of the candidates under `parent` in the order that exactness requires.

    Sampled candidates come first. If a sampled candidate is rejected, a deterministic candidate
    with the same token then has probability 0, so it is never accepted.

    Args:
        tree: tree of one sequence.
        parent: a node, or ROOT.
        target_probs: the target's processed distribution after `parent`, normalized.

    Raises:
        DraftError: a sampled candidate has probability zero in the draft distribution.
    """
    residual = target_probs
    for rule in (_recursive_rejection, _point_mass):
        for check in rule(tree, parent, residual):
            yield check
            residual = check.residual


def accept_greedy_path(
    tree: SequenceTree, best_token: Callable[[int], int]
) -> tuple[list[int], int]:
    """Return the accepted path and the next token of greedy decoding.

    Args:
        tree: tree of one sequence.
        best_token: function that returns the target's most likely token after a node (or ROOT); it
            is called for visited nodes only.
    """
    node = ROOT
    path: list[int] = []
    while True:
        best = best_token(node)
        children = tree.children.get(node, ())
        matching = next((child for child in children if tree.token_ids[child] == best), None)
        if matching is None:
            return path, best
        node = matching
        path.append(node)


def sample_token(probs: Float[Tensor, " vocab"], uniform: float) -> int:
    """Return a token sampled by inversion of the cumulative distribution, in float64.

    Args:
        probs: probabilities of all tokens.
        uniform: random number in [0, 1).
    """
    cumulative = probs.double().cumsum(dim=0)
    threshold = uniform * cumulative[-1]
    token = int(torch.searchsorted(cumulative, threshold, right=True))
    return min(token, int(probs.nonzero()[-1]))


def _recursive_rejection(
    tree: SequenceTree, parent: int, residual: Tensor
) -> Iterator[CandidateCheck]:
    siblings = tree.sampled.get(parent, [])
    if not siblings:
        return
    ids, draft_probs = tree.draft_distribution(parent)
    draft_probs = draft_probs.to(residual.dtype)
    is_distribution = bool(draft_probs.sum().isfinite() & (draft_probs >= 0).all())
    for node in siblings:
        is_token = ids == tree.token_ids[node]
        draft_prob = float((draft_probs * is_token).sum())
        if not (is_distribution and draft_prob > 0):  # NaN is an error as well
            raise DraftError(
                f"sampled candidate {node} has probability zero in the drafter's draft_probs",
                expected="a token id that was sampled without replacement from draft_probs",
                got=tree.token_ids[node],
                remedy="record the distribution that the drafter samples from",
            )
        target_prob = float(residual[tree.token_ids[node]])
        excess = residual.index_add(0, ids, -draft_probs).clamp(min=0)
        residual = _renormalized(excess, otherwise=residual)
        # With the arguments in this order, NaN stays NaN and is never accepted.
        yield CandidateCheck(node, min(target_prob / draft_prob, 1.0), residual)
        rest = draft_probs * ~is_token
        draft_probs = _renormalized(rest, otherwise=rest)


def _point_mass(tree: SequenceTree, parent: int, residual: Tensor) -> Iterator[CandidateCheck]:
    for node in tree.deterministic.get(parent, ()):
        token = tree.token_ids[node]
        accept_prob = float(residual[token])
        rest = residual.clone()
        rest[token] = 0
        residual = _renormalized(rest, otherwise=residual)
        yield CandidateCheck(node, accept_prob, residual)


def _renormalized(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return the normalized weights; `otherwise` if they sum to 0, which is almost impossible."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
