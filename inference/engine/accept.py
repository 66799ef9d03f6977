"""Lossless acceptance: walk down a draft tree so that the emitted tokens follow the target's law.

Two rules, each exact for its kind of candidate, and exact when mixed under one parent:

- sampled candidates, in draw order, by multi-round rejection without replacement (arXiv 2305.09781,
  2401.06706): accept c with probability min(1, p(c) / q(c)); else p <- norm(max(p - q, 0)), remove
  c from q, renormalise.
- deterministic candidates by point mass: accept c with probability p(c); else remove c from p and
  renormalise.

p starts as the target's processed law at the parent; what is left of it when all candidates are
rejected is the law of the next token.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import ROOT, TreeRow
from jakiro.errors import DraftError

TargetProbs = Callable[[int], Float[Tensor, " vocab"]]


class CandidateCheck(NamedTuple):
    """One candidate's turn: accepted with `accept_prob`, else `residual` is the target's law."""

    node: int
    accept_prob: float
    residual: Float[Tensor, " vocab"]


class AcceptedPath(NamedTuple):
    """The accepted nodes, from the first level down, and the law of the token that follows them."""

    path: list[int]
    next_probs: Float[Tensor, " vocab"]


def accept_path(
    tree: TreeRow, target_probs: TargetProbs, decide: Callable[[float], bool]
) -> AcceptedPath:
    """Return the accepted path and the law of the token after it.

    Args:
        tree: one sequence's candidates.
        target_law: the target's processed law after a node (or ROOT); asked for visited nodes only.
        accept: decides each trial, true with the probability it is given.
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
    tree: TreeRow, parent: int, target_probs: Float[Tensor, " vocab"]
) -> Iterator[CandidateCheck]:
    """Yield the candidates under `parent` in the order in which they must be tried.

    Sampled ones come first; a deterministic candidate that repeats a sampled one has probability 0
    by then and is never accepted.

    Args:
        tree: one sequence's candidates.
        parent: a node, or ROOT.
        target_probs: the target's processed law after `parent`, normalised.
    """
    residual = target_probs
    for rule in (_recursive_rejection, _point_mass):
        for check in rule(tree, parent, residual):
            yield check
            residual = check.residual


def accept_greedy_path(tree: TreeRow, best_token: Callable[[int], int]) -> tuple[list[int], int]:
    """Return the path and the next token of `walk` when every law is a point mass.

    Args:
        tree: one sequence's candidates.
        best_token: the target's most likely token after a node (or ROOT); asked for visited ones.
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


def draw(probs: Float[Tensor, " vocab"], uniform: float) -> int:
    """Return the token at quantile `uniform` in [0, 1) of a law, by inversion in float64."""
    cumulative = probs.double().cumsum(dim=0)
    threshold = uniform * cumulative[-1]
    token = int(torch.searchsorted(cumulative, threshold, right=True))
    return min(token, int(probs.nonzero()[-1]))


def _recursive_rejection(tree: TreeRow, parent: int, residual: Tensor) -> Iterator[CandidateCheck]:
    siblings = tree.sampled.get(parent, [])
    if not siblings:
        return
    ids, draft_probs = tree.draft_distribution(parent)
    draft_probs = draft_probs.to(residual.dtype)
    is_distribution = bool(draft_probs.sum().isfinite() & (draft_probs >= 0).all())
    for node in siblings:
        is_token = ids == tree.token_ids[node]
        draft_prob = float((draft_probs * is_token).sum())
        if not (is_distribution and draft_prob > 0):  # NaN is not above 0 either
            raise DraftError(
                f"sampled candidate {node} has no probability under its draft law",
                expected="siblings drawn without replacement from the recorded law",
                got=tree.token_ids[node],
                remedy="record the law that the drafter draws from",
            )
        target_prob = float(residual[tree.token_ids[node]])
        excess = residual.index_add(0, ids, -draft_probs).clamp(min=0)
        residual = _renormalised(excess, otherwise=residual)
        # In this order NaN stays what it is, and accepts nothing.
        yield CandidateCheck(node, min(target_prob / draft_prob, 1.0), residual)
        rest = draft_probs * ~is_token
        draft_probs = _renormalised(rest, otherwise=rest)


def _point_mass(tree: TreeRow, parent: int, residual: Tensor) -> Iterator[CandidateCheck]:
    for node in tree.deterministic.get(parent, ()):
        token = tree.token_ids[node]
        accept_prob = float(residual[token])
        rest = residual.clone()
        rest[token] = 0
        residual = _renormalised(rest, otherwise=residual)
        yield CandidateCheck(node, accept_prob, residual)


def _renormalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return weights / sum; `otherwise` where nothing is left, which happens with probability 0."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
