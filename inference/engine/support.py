"""The few hundred tokens whose target probabilities change when children of a node are rejected.

A rejection changes the residual distribution at the ids of the node's recorded draft distribution
and at the tokens of the children. All other probabilities are only scaled, so their sum is enough
to check all children, and the residual distribution of the whole vocabulary is needed only once:

    id             3   7   9   7     others       id 7 is a draft id and the token of a child
    column         0   1   2   1
    target        .2  .3  .1   0         .4
    draft         .5  .3  .2   0
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
        column = _first_columns(ids, probs.shape[1])
        target = _without_repeats(probs.gather(1, ids).double(), column)
        draft = None if recorded is None else _draft(recorded.probs, column)
        return cls(ids, column, target, outside_mass(probs, ids), draft)

    def columns_of_last(self, count: int) -> Int[Tensor, "batch count"]:
        """Return the columns with the probabilities of the last `count` ids."""
        return self.column[:, self.column.shape[1] - count :]


def outside_mass(
    probs: Float[Tensor, "batch vocab"], ids: Int[Tensor, "batch ids"]
) -> Float[Tensor, " batch"]:
    """Return the sum of all probabilities except those of `ids`, in float64.

    The difference between 1 and the probability of `ids` would be mostly rounding error if a
    drafter is good.
    """
    return probs.to(torch.float64, copy=True).scatter_(1, ids, 0.0).sum(dim=1)


def _first_columns(ids: Int[Tensor, "batch ids"], vocab: int) -> Int[Tensor, "batch ids"]:
    """Return, for each id, the first column with the same id."""
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first = ids.new_empty(len(ids), vocab)  # only the values at `ids` are written and read
    first.scatter_reduce_(1, ids, columns, "amin", include_self=False)
    return first.gather(1, ids)


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
