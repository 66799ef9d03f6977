"""Acceptance of a batch of trees on the device, without synchronization.

The rules, the order of checks and the random numbers are those of `accept.accept_path`, so the same
candidates are accepted, up to the rounding of sums. Processors must not read the prefix, because
the distributions of several sequences, at one node each, are processed together.
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
    """The accepted path of every tree, and the next token."""

    path: Int[Tensor, "batch depth"]  # accepted nodes, padded with ROOT
    next_token: Int[Tensor, " batch"]
    # whether the distributions at visited nodes are finite, and all checked sampled candidates have
    # a draft probability above 0
    is_sound: Bool[Tensor, " batch"]


def accept_paths(
    tree: DraftTree, target_probs: BatchTargetProbs, uniforms: Float[Tensor, "batch checks"]
) -> AcceptedPaths:
    """Return each sequence's accepted path and next token.

    Args:
        tree: trees of all sequences.
        target_probs: function that returns the target's processed distributions after one node (or
            ROOT) of each sequence.
        uniforms: random numbers in [0, 1), one more for each sequence than a tree has nodes. They
            are used in the order of the checks, and then for the next token.
    """
    descent = _Descent(tree, target_probs, uniforms)
    path = [descent.descend() for _ in range(tree.max_depth)]
    next_token = _sample_tokens(descent.residual, descent.uniform())
    columns = torch.stack(path, dim=1) if path else next_token.new_empty(len(next_token), 0)
    return AcceptedPaths(columns, next_token, descent.is_sound)


class _Check(NamedTuple):
    """The next candidate to check in each sequence, if there is one."""

    node: Int[Tensor, " batch"]
    token: Int[Tensor, " batch"]
    is_sampled: Bool[Tensor, " batch"]
    is_checked: Bool[Tensor, " batch"]


@dataclass
class _DraftDistribution:
    """The draft distribution at each sequence's current node, without rejected candidates."""

    ids: Int[Tensor, "batch m"]
    probs: Float[Tensor, "batch m"]

    @property
    def is_distribution(self) -> Bool[Tensor, " batch"]:
        """Whether the values are finite and not negative."""
        return self.probs.sum(dim=-1).isfinite() & (self.probs >= 0).all(dim=-1)

    def probability(self, token: Tensor) -> Tensor:
        """Return the probability of one token of each sequence."""
        return (self.probs * (self.ids == token[:, None])).sum(dim=-1)

    def remove(self, token: Tensor, where: Tensor) -> None:
        """Remove a token from the distributions selected by `where`, and renormalize them."""
        rest = self.probs * (self.ids != token[:, None])
        self.probs = torch.where(where[:, None], _renormalized(rest, rest), self.probs)


class _Descent:
    """A descent from the roots: each sequence's current node and residual distribution."""

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
        # Ids outside the vocabulary are only clamped here; the caller rejects them on the host.
        self.token_ids = tree.token_ids.clamp(0, self.residual.shape[1] - 1)
        self._check(self.residual)

    def uniform(self) -> Float[Tensor, " batch"]:
        """Return the next unused random number of each sequence."""
        return self.uniforms[self.every, self.num_used]

    def descend(self) -> Int[Tensor, " batch"]:
        """Check the children of each sequence's current node; return accepted children, or ROOT."""
        if self._is_over():
            return torch.full_like(self.at, ROOT)
        candidates = self.children[self.every, self.at + 1]
        draft = self._draft_distribution()
        accepted_node = torch.full_like(self.at, ROOT)
        for order in range(self.tree.max_siblings):
            check = self._next_check(candidates[:, order], self.is_active & (accepted_node == ROOT))
            accepted = self._decide(check, draft)
            accepted_node = torch.where(accepted, check.node, accepted_node)
        self.is_active = accepted_node != ROOT
        self.at = torch.where(self.is_active, accepted_node, self.at)
        if not self._is_over():
            probs = self.target_probs(self.at)
            self._check(probs)
            self.residual = torch.where(self.is_active[:, None], probs, self.residual)
        return accepted_node

    def _decide(self, check: _Check, draft: _DraftDistribution | None) -> Bool[Tensor, " batch"]:
        """Return which candidates are accepted, and update the residual distributions."""
        probability = self.residual[self.every, check.token].double()
        after = self.residual.scatter(1, check.token[:, None], 0.0)
        if draft is not None:
            drafted = draft.probability(check.token).double()
            is_possible = draft.is_distribution & (drafted > 0)  # False for NaN
            self.is_sound = self.is_sound & (is_possible | ~(check.is_checked & check.is_sampled))
            probability = torch.where(check.is_sampled, probability / drafted, probability)
            excess = self.residual.scatter_add(1, draft.ids, -draft.probs).clamp(min=0)
            after = torch.where(check.is_sampled[:, None], excess, after)
        accepted = check.is_checked & (self.uniform() < probability)
        self.num_used = self.num_used + check.is_checked
        rejected = check.is_checked & ~accepted
        after = _renormalized(after, otherwise=self.residual)
        self.residual = torch.where(rejected[:, None], after, self.residual)
        if draft is not None:
            draft.remove(check.token, where=rejected & check.is_sampled)
        return accepted

    def _next_check(self, node: Tensor, may_check: Tensor) -> _Check:
        index = node.clamp(min=0)
        return _Check(
            node,
            self.token_ids[self.every, index],
            self.tree.kind[self.every, index] == CandidateKind.SAMPLED,
            may_check & (node != ROOT),
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
        """Whether all sequences are done; always False if the check would need synchronization."""
        return self.every.device.type == "cpu" and not bool(self.is_active.any())


def _children(tree: DraftTree) -> Int[Tensor, "batch parents siblings"]:
    """Return the valid children of ROOT (index 0) and node n (index n + 1) in the order of checks.

    Sampled children come first, in the order of sampling; the table is padded with ROOT.
    """
    batch, count = tree.token_ids.shape
    table = tree.parent.new_full((batch, (count + 1) * (tree.max_siblings + 1)), ROOT)
    nodes = torch.arange(count, device=table.device)
    order_key = torch.where(tree.kind == CandidateKind.SAMPLED, tree.rank, count + nodes)
    are_siblings = tree.parent[:, :, None] == tree.parent[:, None, :]
    is_earlier = (
        are_siblings & tree.is_valid[:, None, :] & (order_key[:, None, :] < order_key[:, :, None])
    )
    # The last column receives the invalid nodes, and is removed at the end.
    order = torch.where(tree.is_valid, is_earlier.sum(dim=-1), tree.max_siblings)
    cells = (tree.parent + 1) * (tree.max_siblings + 1) + order
    table.scatter_(1, cells, nodes.expand(batch, -1))
    return table.unflatten(1, (count + 1, -1))[:, :, : tree.max_siblings]


def _sample_tokens(probs: Tensor, uniform: Tensor) -> Int[Tensor, " batch"]:
    """Return a token sampled from each distribution, by the method of `accept.sample_token`."""
    cumulative = probs.double().cumsum(dim=-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    tokens = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs != 0, tokens, 0).amax(dim=-1)
    return torch.minimum(token, last)


def _renormalized(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return the normalized weights; `otherwise` if they sum to 0, which is almost impossible."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
