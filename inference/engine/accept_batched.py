"""Acceptance for a batch of sequences on the device, without a host sync.

Same rules, same order of trials, same uniforms: it decides as `accept.walk` does, up to the
rounding of sums. It serves sampling whose processors look at no prefix; the law of a visited node
is shaped for all sequences together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree

BatchTargetProbs = Callable[[Int[Tensor, " batch"]], Float[Tensor, "batch vocab"]]


class AcceptedPaths(NamedTuple):
    """What was accepted of every tree, and the token that follows."""

    path: Int[Tensor, "batch depth"]  # accepted nodes, then ROOT
    next_token: Int[Tensor, " batch"]
    is_sound: Bool[Tensor, " batch"]  # every law that decided was finite, every draft possible


def accept_paths(
    tree: DraftTree, target_probs: BatchTargetProbs, uniforms: Float[Tensor, "batch trials"]
) -> AcceptedPaths:
    """Return each sequence's accepted path and next token.

    Args:
        tree: the candidates.
        target_law: the target's processed laws after one node (or ROOT) of each sequence.
        uniforms: as many as nodes and one more; used in the order of the trials, then for the
            next token.
    """
    descent = _Descent(tree, target_probs, uniforms)
    path = [descent.descend() for _ in range(tree.max_depth)]
    next_token = _draw_rows(descent.residual, descent.uniform())
    columns = torch.stack(path, dim=1) if path else next_token.new_empty(len(next_token), 0)
    return AcceptedPaths(columns, next_token, descent.is_sound)


class _Check(NamedTuple):
    """The candidates whose turn it is, one of each sequence that has one left."""

    node: Int[Tensor, " batch"]
    token: Int[Tensor, " batch"]
    is_sampled: Bool[Tensor, " batch"]
    is_tried: Bool[Tensor, " batch"]


@dataclass
class _DraftDistribution:
    """The draft law at each sequence's node, without the candidates tried so far."""

    ids: Int[Tensor, "batch m"]
    probs: Float[Tensor, "batch m"]

    @property
    def is_distribution(self) -> Bool[Tensor, " batch"]:
        """Whether these are probabilities at all."""
        return self.probs.sum(dim=-1).isfinite() & (self.probs >= 0).all(dim=-1)

    def probability(self, token: Tensor) -> Tensor:
        """Return the probability of one token of each sequence."""
        return (self.probs * (self.ids == token[:, None])).sum(dim=-1)

    def remove(self, token: Tensor, where: Tensor) -> None:
        """Take a token out of the laws chosen by `where` and renormalise them."""
        rest = self.probs * (self.ids != token[:, None])
        self.probs = torch.where(where[:, None], _renormalised(rest, rest), self.probs)


class _Descent:
    """Where each sequence stands, and what is left of the target's law there."""

    def __init__(self, tree: DraftTree, target_probs: BatchTargetProbs, uniforms: Tensor) -> None:
        self.tree = tree
        self.target_probs = target_probs
        self.uniforms = uniforms
        self.every = torch.arange(len(uniforms), device=uniforms.device)
        self.at = torch.full_like(self.every, ROOT)
        self.num_used = torch.zeros_like(self.every)
        self.is_active = torch.ones_like(self.every, dtype=torch.bool)
        self.is_sound = self.is_active
        self.children = _children(tree)
        self.residual = target_probs(self.at)
        # What is no token is the caller's to refuse, once it can look.
        self.token_ids = tree.token_ids.clamp(0, self.residual.shape[1] - 1)
        self._check(self.residual)

    def uniform(self) -> Float[Tensor, " batch"]:
        """Return the next unused number of each sequence."""
        return self.uniforms[self.every, self.num_used]

    def descend(self) -> Int[Tensor, " batch"]:
        """Try the children of each sequence's node; return the accepted ones, or ROOT."""
        if self._is_over():
            return torch.full_like(self.at, ROOT)
        candidates = self.children[self.every, self.at + 1]
        draft = self._draft_distribution()
        chosen = torch.full_like(self.at, ROOT)
        for place in range(self.tree.max_siblings):
            check = self._next_check(candidates[:, place], self.is_active & (chosen == ROOT))
            accepted = self._decide(check, draft)
            chosen = torch.where(accepted, check.node, chosen)
        self.is_active = chosen != ROOT
        self.at = torch.where(self.is_active, chosen, self.at)
        if not self._is_over():
            probs = self.target_probs(self.at)
            self._check(probs)
            self.residual = torch.where(self.is_active[:, None], probs, self.residual)
        return chosen

    def _decide(self, check: _Check, draft: _DraftDistribution | None) -> Bool[Tensor, " batch"]:
        """Accept some of the candidates, and leave the residual of the others."""
        probability = self.residual[self.every, check.token].double()
        after = self.residual.scatter(1, check.token[:, None], 0.0)
        if draft is not None:
            drafted = draft.probability(check.token).double()
            is_possible = draft.is_distribution & (drafted > 0)  # NaN is not above 0 either
            self.is_sound = self.is_sound & (is_possible | ~(check.is_tried & check.is_sampled))
            probability = torch.where(check.is_sampled, probability / drafted, probability)
            excess = self.residual.scatter_add(1, draft.ids, -draft.probs).clamp(min=0)
            after = torch.where(check.is_sampled[:, None], excess, after)
        accepted = check.is_tried & (self.uniform() < probability)
        self.num_used = self.num_used + check.is_tried
        rejected = check.is_tried & ~accepted
        after = _renormalised(after, otherwise=self.residual)
        self.residual = torch.where(rejected[:, None], after, self.residual)
        if draft is not None:
            draft.remove(check.token, where=rejected & check.is_sampled)
        return accepted

    def _next_check(self, node: Tensor, may_try: Tensor) -> _Check:
        place = node.clamp(min=0)
        return _Check(
            node,
            self.token_ids[self.every, place],
            self.tree.kind[self.every, place] == CandidateKind.SAMPLED,
            may_try & (node != ROOT),
        )

    def _draft_distribution(self) -> _DraftDistribution | None:
        recorded = self.tree.draft_probs
        if recorded is None:
            return None
        probs = recorded.probs[self.every, self.at + 1].to(self.residual.dtype)
        return _DraftDistribution(recorded.ids[self.every, self.at + 1], probs)

    def _check(self, probs: Tensor) -> None:
        self.is_sound = self.is_sound & (probs.sum(dim=-1).isfinite() | ~self.is_active)

    def _is_over(self) -> bool:
        """Whether nothing is left to do; asked on the CPU only, where looking is free."""
        return self.every.device.type == "cpu" and not bool(self.is_active.any())


def _children(tree: DraftTree) -> Int[Tensor, "batch parents siblings"]:
    """Return the valid children of ROOT (at 0) and node n (at n + 1) in the order of their trials.

    Drawn ones come first, in draw order, then the chosen ones; missing ones are ROOT.
    """
    batch, count = tree.token_ids.shape
    table = tree.parent.new_full((batch, (count + 1) * (tree.max_siblings + 1)), ROOT)
    nodes = torch.arange(count, device=table.device)
    order_key = torch.where(tree.kind == CandidateKind.SAMPLED, tree.rank, count + nodes)
    are_siblings = tree.parent[:, :, None] == tree.parent[:, None, :]
    is_earlier = (
        are_siblings & tree.is_valid[:, None, :] & (order_key[:, None, :] < order_key[:, :, None])
    )
    # One more column, which is cut off again, takes the invalid nodes.
    order = torch.where(tree.is_valid, is_earlier.sum(dim=-1), tree.max_siblings)
    places = (tree.parent + 1) * (tree.max_siblings + 1) + order
    table.scatter_(1, places, nodes.expand(batch, -1))
    return table.unflatten(1, (count + 1, -1))[:, :, : tree.max_siblings]


def _draw_rows(probs: Tensor, uniform: Tensor) -> Int[Tensor, " batch"]:
    """Return each law's token at quantile `uniform`, as `accept.draw` does."""
    cumulative = probs.double().cumsum(dim=-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    places = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs != 0, places, 0).amax(dim=-1)
    return torch.minimum(token, last)


def _renormalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return weights / sum; `otherwise` where nothing is left, which happens with probability 0."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
