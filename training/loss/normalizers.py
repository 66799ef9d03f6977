"""Normalizers of the target's distributions, computed once for all passes, levels and epochs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from training.loss.batch import indices_of

Logits = Callable[[Tensor], Tensor]


class Normalizers(NamedTuple):
    """What the whole vocabulary contributes to the target's distribution at each position.

    The log-probability of a token is its logit minus `log_sum`; at another temperature than 1, all
    logits are divided by it before. With these values, the logits of
    the draft vocabulary are enough for a loss, which saves time if several passes or levels predict
    the same position, or if the normalizers are stored on disk. In half precision, a logit may be
    rounded differently in a matrix product with fewer rows, so that the probabilities may sum to
    slightly more than 1.

    Attributes:
        log_sum: logarithm of the sum of exp(logit) over the whole vocabulary.
    """

    log_sum: Float[Tensor, "*positions"]
    best: Int[Tensor, "*positions"]

    def at(self, *indices: Tensor) -> "Normalizers":
        """Return the normalizers of the positions at `indices`."""
        return Normalizers(self.log_sum[indices], self.best[indices])

    def to(self, device: torch.device) -> "Normalizers":
        """Return the normalizers on `device`."""
        return Normalizers(*(part.to(device) for part in self))

    def level(self, level: int) -> "Normalizers":
        """Return the normalizers of one level, the last dimension of the positions."""
        return Normalizers(self.log_sum[..., level], self.best[..., level])


@torch.no_grad()
def normalizers_of(
    features: Float[Tensor, "batch length hidden"],
    needed: Bool[Tensor, "batch length"],
    logits: Logits,
    chunk_size: int,
) -> Normalizers:
    """Return the normalizers of the target's distributions; zeros where they are not needed.

    Args:
        needed: positions at which the drafter learns the target's distribution.
    """
    known = Normalizers(
        torch.zeros(needed.numel(), device=features.device),
        torch.zeros(needed.numel(), dtype=torch.long, device=features.device),
    )
    flat = features.flatten(0, 1)
    for chunk in indices_of(needed).split(chunk_size):
        whole = logits(flat[chunk]).float()
        known.log_sum[chunk] = whole.logsumexp(dim=-1)
        known.best[chunk] = whole.argmax(dim=-1)
    return Normalizers(*(part.view_as(needed) for part in known))
