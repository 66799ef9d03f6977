"""Nucleus (top-p) filter that sorts only the largest scores; the result is that of transformers."""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import TopPLogitsWarper

LARGEST = 256  # number of scores that are sorted; nuclei are rarely larger
ROUNDING = 1e-4  # far above the errors of sums of probabilities, which are about 1e-5 in float32


def filter_nucleus(
    warper: TopPLogitsWarper, scores: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n vocab"]:
    """Return what `warper` returns for these scores, in a fraction of its time on a CPU.

    The warper sorts the whole vocabulary, whereas this function sorts only the largest scores. If
    these do not determine a row's nucleus with certainty, the warper itself filters the row: if the
    nucleus is larger, if the first excluded score equals the last included score, or if rounding
    could include or exclude a token.

    Args:
        warper: the filter.
        scores: processed logits, which are not changed.
    """
    if scores.shape[-1] <= LARGEST or warper.min_tokens_to_keep >= LARGEST:
        return warper(torch.empty(len(scores), 0, dtype=torch.long), scores)
    largest, tokens = scores.topk(LARGEST, dim=-1)
    total = (scores - largest[:, :1]).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    probs = (largest - largest[:, :1]).double().exp() / total
    before = probs.cumsum(dim=-1) - probs  # probability of all tokens with larger scores
    kept = before < warper.top_p
    kept[:, : warper.min_tokens_to_keep] = True
    filtered = torch.full_like(scores, warper.filter_value)
    filtered.scatter_(1, tokens, largest.where(kept, warper.filter_value))
    doubtful = ~_is_certain(largest, before, kept, warper.top_p)
    if bool(doubtful.any()):
        rows = scores[doubtful]
        filtered[doubtful] = warper(torch.empty(len(rows), 0, dtype=torch.long), rows)
    return filtered


def _is_certain(largest: Tensor, before: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Return whether each row's nucleus certainly ends among the largest scores."""
    is_last = kept[:, :-1] & ~kept[:, 1:]
    is_tied = largest[:, :-1] == largest[:, 1:]
    is_near = (before - top_p).abs() < ROUNDING
    is_sound = before.isfinite().all(dim=-1)
    is_unique = is_last.any(dim=-1) & ~(is_last & is_tied).any(dim=-1)
    return is_sound & is_unique & ~is_near.any(dim=-1)
