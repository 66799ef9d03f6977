"""Acceptance of a batch of trees on the device, without synchronization.

Where tokens are sampled, the rules, the order of checks and the random numbers are those of
`accept.accept_path`, so the same candidates are accepted, up to the rounding of sums. Each level of
a tree is checked on the few ids of `Support`; the residual distribution of the whole vocabulary is
computed once, at the node where the descent ends. Processors must not read the prefix, because the
distributions of several sequences, at one node each, are processed together.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree
from inference.engine.siblings import (
    Checks,
    ChildTable,
    RecordedDistribution,
    Siblings,
    Support,
    check_siblings,
)

BatchTargetProbs = Callable[[Int[Tensor, " batch"]], Float[Tensor, "batch vocab"]]


class AcceptedPaths(NamedTuple):
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
        uniforms: random numbers in [0, 1), one more for each sequence than a tree has nodes. They
            are used in the order of the checks, and then for the next token.
    """
    descent = _Descent(tree, target_probs, uniforms)
    path = [descent.descend() for _ in range(tree.max_depth)]
    next_token, total = _sample_tokens(descent.residual(), descent.uniform())
    columns = torch.stack(path, dim=1) if path else next_token.new_empty(len(next_token), 0)
    # If a distribution is not finite, no candidate is accepted by it, so the descent ends there.
    return AcceptedPaths(columns, next_token, descent.is_sound & total.isfinite())


class _Descent:
    """A descent from the roots: each sequence's current node and the distribution after it.

    Sequences whose descent has ended stay at their last node, and the checks there are repeated.
    """

    def __init__(self, tree: DraftTree, target_probs: BatchTargetProbs, uniforms: Tensor) -> None:
        self.target_probs = target_probs
        self.draft_probs = tree.draft_probs
        self.every = torch.arange(len(uniforms), device=uniforms.device)
        self.at = torch.full_like(self.every, ROOT)
        self.num_used = torch.zeros_like(self.every)
        self.is_active = torch.ones_like(self.every, dtype=torch.bool)
        self.is_sound = self.is_active
        self.probs = target_probs(self.at)
        self.children = ChildTable(tree, vocab=self.probs.shape[1])
        self.orders = torch.arange(tree.max_siblings, device=uniforms.device)
        self.uniforms = F.pad(uniforms, (0, tree.max_siblings))  # for padding among the children
        self.last: tuple[Support, Checks] | None = None

    def uniform(self) -> Float[Tensor, " batch"]:
        return self.uniforms[self.every, self.num_used]

    def descend(self) -> Int[Tensor, " batch"]:
        """Check the children of each sequence's current node; return accepted children, or ROOT."""
        if self._is_over():
            return torch.full_like(self.at, ROOT)
        siblings = self.children.under(self.at)
        support = Support.of(self.probs, siblings.token, self._draft_distribution())
        checks = check_siblings(support, siblings)
        self.last = support, checks
        accepted_node = self._decide(siblings, checks)
        self.is_active = accepted_node != ROOT
        self.at = torch.where(self.is_active, accepted_node, self.at)
        if not self._is_over():
            self.probs = self.target_probs(self.at)
        return accepted_node

    def residual(self) -> Float[Tensor, "batch vocab"]:
        """Return the distributions of the next tokens in float64, not normalized."""
        residual = self.probs.to(torch.float64, copy=True)
        if self.last is None:
            return residual
        support, checks = self.last
        after = checks.residual.gather(1, support.column)
        unchanged = residual.gather(1, support.ids)
        after = torch.where(self.is_active[:, None], unchanged, after)
        return residual.scatter_(1, support.ids, after)

    def _decide(self, siblings: Siblings, checks: Checks) -> Int[Tensor, " batch"]:
        uniforms = self.uniforms.gather(1, self.num_used[:, None] + self.orders)
        is_valid = siblings.is_valid & self.is_active[:, None]
        accepts = (uniforms < checks.accept_prob) & is_valid
        is_checked = (accepts.cumsum(dim=1) <= accepts) & is_valid  # up to the first accepted child
        self.num_used = self.num_used + is_checked.sum(dim=1)
        self.is_sound = self.is_sound & (checks.is_possible | ~is_checked).all(dim=1)
        return siblings.node.masked_fill(~(accepts & is_checked), ROOT).amax(dim=1)

    def _draft_distribution(self) -> RecordedDistribution | None:
        recorded = self.draft_probs
        if recorded is None:
            return None
        here = self.every, self.at + 1
        return RecordedDistribution(recorded.ids[here], recorded.probs[here])

    def _is_over(self) -> bool:
        """Whether all sequences are done; always False if the check would need synchronization."""
        return self.every.device.type == "cpu" and not bool(self.is_active.any())


def _sample_tokens(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token sampled from each row of weights, and the sum of each row.

    The method is that of `accept.sample_token`.
    """
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total).clamp(max=weights.shape[1] - 1)
    return torch.minimum(token, last)[:, 0], total[:, 0]


def accept_greedy_paths(
    tree: DraftTree, best_tokens: Int[Tensor, "batch queries"]
) -> tuple[Int[Tensor, "batch depth"], Int[Tensor, " batch"]]:
    """Return the greedily accepted path of every tree, padded with ROOT, and the next token.

    The paths are those of `accept.accept_greedy_path`. The number of operations depends only on the
    depth of the trees, so that the operations can be recorded as a CUDA graph.
    """
    following = _following(tree, best_tokens)
    cell = torch.zeros_like(best_tokens[:, :1])  # the cell of ROOT
    cells = [cell]
    for _ in range(tree.max_depth):
        cell = following.gather(1, cell)
        cells.append(cell)
    visited = torch.cat(cells, dim=1)
    is_end = visited > tree.num_nodes
    last = visited.masked_fill(is_end, 0).amax(dim=1, keepdim=True)  # parents come first
    path = (visited - 1).masked_fill(is_end, ROOT)[:, 1:]
    return path, best_tokens.gather(1, last)[:, 0]


def _following(tree: DraftTree, best_tokens: Tensor) -> Int[Tensor, "batch cells"]:
    """Return the accepted child of every node.

    ROOT is at index 0, and node n at index n + 1. The last index means that no child is accepted.
    """
    batch, count = tree.token_ids.shape
    parents = tree.parent + 1
    is_best = tree.is_valid & (tree.token_ids == best_tokens.gather(1, parents))
    cells = torch.arange(1, count + 1, device=parents.device)
    following = parents.new_full((batch, count + 2), count + 1)
    return following.scatter_reduce_(1, parents, torch.where(is_best, cells, count + 1), "amin")
