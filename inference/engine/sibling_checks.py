"""Checks of all children of a node at once, each as if the children before it were rejected.

Under this assumption, later checks and the residual distribution do not depend on random numbers.
When the probabilities are compared with random numbers, only the checks up to the first accepted
child are used, or the residual distribution if no child is accepted.

A deterministic candidate is checked like a candidate that was sampled from a point mass.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from inference.engine.siblings import Siblings
from inference.engine.support import Support


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
        """Whether each child can have been selected; False for invalid draft distributions."""
        return self.draft_prob > 0


def check_siblings(support: Support, siblings: Siblings) -> Checks:
    """Return the checks of all children of one node of each sequence.

    Residual distributions are not normalized. Instead, the draft distribution that is subtracted
    is multiplied by the residual's sum.
    """
    columns = torch.arange(support.ids.shape[1], device=support.ids.device)
    is_token = support.columns_of_last(siblings.token.shape[1])[:, :, None] == columns
    is_token = is_token & siblings.is_valid[:, :, None]
    draft = _draft_distributions(support.draft, is_token, siblings.is_sampled[:, :, None])
    outside = support.outside[:, None]
    residuals = [support.target]
    totals = [support.target.sum(dim=1, keepdim=True) + outside]
    for own in draft.unbind(dim=1):
        excess = torch.addcmul(residuals[-1], totals[-1], own, value=-1).clamp_(min=0)
        residuals.append(excess)
        totals.append(excess.sum(dim=1, keepdim=True) + outside)
    residual, total = torch.stack(residuals, dim=1), torch.cat(totals, dim=1)
    target_prob = (residual[:, :-1] * is_token).sum(dim=2) / total[:, :-1]
    draft_prob = (draft * is_token).sum(dim=2)
    return Checks(target_prob, draft_prob, _last_not_zero(residual, total))


def _draft_distributions(
    recorded: Tensor | None, is_token: Tensor, is_sampled: Tensor
) -> Float[Tensor, "batch siblings ids"]:
    """Return the distribution from which each child was sampled; zeros for padding.

    Args:
        recorded: draft distribution of the first sampled child; None if nothing was sampled.
    """
    point_masses = is_token.double()
    if recorded is None:
        return point_masses
    removed = is_token & is_sampled
    rest = recorded[:, None] * (removed.cumsum(dim=1) <= removed)  # without earlier children
    total = rest.sum(dim=2, keepdim=True).clamp_(min=torch.finfo(rest.dtype).tiny)
    total[:, 0] = 1  # The first child is sampled from the recorded distribution as it is.
    return torch.where(is_sampled, rest / total, point_masses)


def _last_not_zero(residual: Tensor, total: Tensor) -> Float[Tensor, "batch ids"]:
    """Return the last residual whose sum is not zero; only rounding can make a sum zero."""
    every = torch.arange(len(total), device=total.device)
    return residual[every, (total != 0).sum(dim=1) - 1]
