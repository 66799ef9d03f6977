"""The children of one node of each sequence, and the checks of all of them at once.

Each child is checked as if the children before it were rejected. Later checks and the residual
distribution then do not depend on random numbers. When the probabilities are compared with random
numbers, only the checks up to the first accepted child are used, or the residual distribution if no
child is accepted. A deterministic candidate is checked like a candidate that was sampled from a
point mass.

A rejection changes the residual distribution at a few hundred ids: those of the node's recorded
draft distribution, and the tokens of the children. All other probabilities are only scaled, so
their sum is enough for all checks, and the residual distribution of the whole vocabulary is needed
only once:

    id             3   7   9   7     others       id 7 is a draft id and the token of a child
    column         0   1   2   1
    target        .2  .3  .1   0         .4
    draft         .5  .3  .2   0
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree


class Siblings(NamedTuple):
    """The children of one node of each sequence, in the order of checks."""

    node: Int[Tensor, "batch siblings"]
    token: Int[Tensor, "batch siblings"]
    is_valid: Bool[Tensor, "batch siblings"]
    is_sampled: Bool[Tensor, "batch siblings"]


class ChildTable:
    """The valid children of ROOT (index 0) and of node n (index n + 1), with their tokens.

    Args:
        vocab: size of the vocabulary. Ids outside the vocabulary are only clamped here, because
            they are rejected on the host.
    """

    def __init__(self, tree: DraftTree, vocab: int) -> None:
        nodes = _children(tree)
        index = nodes.clamp(min=0).flatten(1)
        tokens = tree.token_ids.clamp(0, vocab - 1).gather(1, index).view_as(nodes)
        kinds = tree.kind.gather(1, index).view_as(nodes)
        is_valid = nodes != ROOT
        is_sampled = is_valid & (kinds == CandidateKind.SAMPLED)
        self._candidates = torch.stack((nodes, tokens), dim=2)
        self._flags = torch.stack((is_valid, is_sampled), dim=2)
        self._every = torch.arange(len(nodes), device=nodes.device)

    def under(self, parent: Int[Tensor, " batch"]) -> Siblings:
        here = self._every, parent + 1
        return Siblings(*self._candidates[here].unbind(dim=1), *self._flags[here].unbind(dim=1))


def _children(tree: DraftTree) -> Int[Tensor, "batch parents siblings"]:
    """Return the valid children of every node in the order of checks, padded with ROOT.

    Sampled children come first, in the order of sampling. For the tree in `inference.draft_tree`:

        parent       ROOT    0       1       2       3       4
        children     0 1     2 3     - -     4 -     - -     - -
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


class RecordedDistribution(NamedTuple):
    """The recorded draft distribution at one node of each sequence; zeros without children."""

    ids: Int[Tensor, "batch drafted"]
    probs: Float[Tensor, "batch drafted"]


class Support(NamedTuple):
    """Target and draft probabilities after one node of each sequence, in float64.

    Attributes:
        ids: ids of the draft distribution, followed by the tokens of the children. An id may
            repeat.
        column: first column with the same id, which has the probabilities of this id. The
            probabilities in the other columns are 0.
        outside: the target's probability of all other ids.
        draft: draft probabilities; 0 or NaN if a recorded probability is negative or not finite;
            None if the trees have no sampled candidates.
    """

    ids: Int[Tensor, "batch ids"]
    column: Int[Tensor, "batch ids"]
    target: Float[Tensor, "batch ids"]
    outside: Float[Tensor, " batch"]
    draft: Float[Tensor, "batch ids"] | None = None

    @classmethod
    def of(
        cls,
        probs: Float[Tensor, "batch vocab"],
        tokens: Int[Tensor, "batch siblings"],
        recorded: RecordedDistribution | None,
    ) -> "Support":
        ids = tokens if recorded is None else torch.cat((recorded.ids, tokens), dim=1)
        columns = torch.arange(ids.shape[1], device=ids.device)
        first = ids.new_empty(probs.shape)  # only the values at `ids` are written and read
        first.scatter_reduce_(1, ids, columns.expand_as(ids), "amin", include_self=False)
        column = first.gather(1, ids)
        target = _without_repeats(probs.gather(1, ids).double(), column)
        draft = None if recorded is None else _draft(recorded.probs, column)
        return cls(ids, column, target, outside_mass(probs, ids), draft)


def outside_mass(
    probs: Float[Tensor, "batch vocab"], ids: Int[Tensor, "batch ids"]
) -> Float[Tensor, " batch"]:
    """Return the sum of all probabilities except those of `ids`, in float64.

    The difference between 1 and the probability of `ids` would be mostly rounding error if a
    drafter is good.
    """
    return probs.to(torch.float64, copy=True).scatter_(1, ids, 0.0).sum(dim=1)


def _without_repeats(values: Tensor, column: Tensor) -> Tensor:
    """Return the values with zeros in the columns of ids that occur earlier."""
    return values * (column == torch.arange(column.shape[1], device=column.device))


def _draft(recorded: Tensor, column: Tensor) -> Tensor:
    """Return the draft probabilities in all columns, given those in the first columns."""
    lowest, highest = recorded.aminmax(dim=1, keepdim=True)
    is_distribution = (lowest >= 0) & (highest < torch.inf)
    probs = recorded.double() * is_distribution  # NaN stays NaN
    everywhere = probs.new_zeros(column.shape)
    return everywhere.scatter_add_(1, column[:, : probs.shape[1]], probs)


class Checks(NamedTuple):
    """The checks of the children of one node of each sequence.

    Attributes:
        draft_prob: draft probability of the token: 1 for a deterministic candidate, 0 for padding.
        residual: residual distribution at the ids of the support after all children were rejected,
            not normalized. At all other ids it is the target's distribution.
    """

    target_prob: Float[Tensor, "batch siblings"]
    draft_prob: Float[Tensor, "batch siblings"]
    residual: Float[Tensor, "batch ids"]

    @property
    def accept_prob(self) -> Float[Tensor, "batch siblings"]:
        """The probability of accepting each child; above 1 means 1, and NaN is never accepted."""
        return self.target_prob / self.draft_prob

    @property
    def is_possible(self) -> Bool[Tensor, "batch siblings"]:
        return self.draft_prob > 0


def check_siblings(support: Support, siblings: Siblings) -> Checks:
    """Return the checks of all children of one node of each sequence.

    Residual distributions are not normalized. Instead, the draft distribution that is subtracted
    is multiplied by the residual's sum.
    """
    columns = torch.arange(support.ids.shape[1], device=support.ids.device)
    column = support.column[:, len(columns) - siblings.token.shape[1] :]
    is_token = (column[:, :, None] == columns) & siblings.is_valid[:, :, None]
    draft = _draft_distributions(support.draft, is_token, siblings.is_sampled[:, :, None])
    outside = support.outside[:, None]
    residuals = [support.target]
    totals = [support.target.sum(dim=1, keepdim=True) + outside]
    for probs in draft.unbind(dim=1):
        excess = torch.addcmul(residuals[-1], totals[-1], probs, value=-1).clamp_(min=0)
        residuals.append(excess)
        totals.append(excess.sum(dim=1, keepdim=True) + outside)
    residual, total = torch.stack(residuals, dim=1), torch.cat(totals, dim=1)
    target_prob = (residual[:, :-1] * is_token).sum(dim=2) / total[:, :-1]
    draft_prob = (draft * is_token).sum(dim=2)
    # Only rounding can make a sum zero; the last residual before that is then the result.
    every = torch.arange(len(total), device=total.device)
    return Checks(target_prob, draft_prob, residual[every, (total != 0).sum(dim=1) - 1])


def _draft_distributions(
    recorded: Tensor | None, is_token: Tensor, is_sampled: Tensor
) -> Float[Tensor, "batch siblings ids"]:
    """Return the distribution from which each child was sampled; zeros for padding."""
    point_masses = is_token.double()
    if recorded is None:
        return point_masses
    removed = is_token & is_sampled
    rest = recorded[:, None] * (removed.cumsum(dim=1) <= removed)  # without earlier children
    total = rest.sum(dim=2, keepdim=True).clamp_(min=torch.finfo(rest.dtype).tiny)
    total[:, 0] = 1  # The first child is sampled from the recorded distribution as it is.
    return torch.where(is_sampled, rest / total, point_masses)
