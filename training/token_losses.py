"""Distances of a draft law from the target's law, by which drafters learn to guess tokens."""

from typing import Literal

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
    and "reverse_kl" -log m.

    Args:
        kind: which of them.
        target: log-probabilities p of the drafted tokens, which need not sum to 1.
        draft: log-probabilities q.
    """
    match kind:
        case "cross_entropy":
            return -(target.exp() * draft).sum(dim=-1)
        case "kl":
            return (target.exp() * (target - draft)).sum(dim=-1)
        case "reverse_kl":
            return (draft.exp() * (draft - target)).sum(dim=-1)
        case "total_variation":
            outside = (1 - target.exp().sum(dim=-1)).clamp(min=0)
            return ((target.exp() - draft.exp()).abs().sum(dim=-1) + outside) / 2
