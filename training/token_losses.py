"""Distances of a draft law from the target's law, by which drafters learn to guess tokens."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

TokenLoss = Literal["cross_entropy", "kl", "reverse_kl", "total_variation"]


def token_losses(
    kind: TokenLoss,
    target: Float[Tensor, "n vocab"],
    draft: Float[Tensor, "n vocab"],
) -> Float[Tensor, " n"]:
    """Return the loss of each draft law q against the target's law p.

    - "cross_entropy": `-sum p log q`
    - "kl": `sum p (log p - log q)`: the same gradients, but 0 when the laws are equal
    - "reverse_kl": `sum q (log q - log p)`: seeks a mode instead of covering all
    - "total_variation": `sum |p - q| / 2`: the share of single drafts that would be rejected

    Where only some tokens are drafted the sums run over these, and what p gives to the others
    counts as rejected only. With m what p gives to those drafted, "kl" is then at least m log m,
    and "reverse_kl" -log m. Tokens that a law never gives, such as those of a padded vocabulary
    whose logits are -inf, add nothing to a sum over that law.

    Args:
        kind: which of them.
        target: log-probabilities p of the drafted tokens, which need not sum to 1.
        draft: log-probabilities q.
    """
    match kind:
        case "cross_entropy":
            return -_expected(draft, target)
        case "kl":
            return _expected(target - draft, target)
        case "reverse_kl":
            return _expected(draft - target, draft)
        case "total_variation":
            outside = (1 - target.exp().sum(dim=-1)).clamp(min=0)
            return ((target.exp() - draft.exp()).abs().sum(dim=-1) + outside) / 2


def _expected(values: Float[Tensor, "n vocab"], law: Float[Tensor, "n vocab"]) -> Tensor:
    """Return the mean of values under a law, where it is 0 whatever they are; so are gradients."""
    probs = law.exp()
    return (probs * torch.where(probs > 0, values, 0.0)).sum(dim=-1)
