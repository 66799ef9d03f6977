"""The positions of a batch that carry a loss, gathered from the packed sequences.

For a position i that is drafted at distance d = i - anchor >= 1, and for levels k = 0, 1, ...:

    output at i, level k            predicts Y[i + k], the feature for the logits of x[i + k + 1]
    posterior used at level k       is conditioned on x[i + 1], ..., x[i + k]

Y[i] is the target's feature at position i, and x[i] is the token at position i. The posterior
consists of the mixture weights of the components, given these tokens.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.experts import ExpertsOutput
from training.loss.batch import Batch, indices_of
from training.loss.normalizers import Normalizers


class Examples(NamedTuple):
    """The gathered positions, one sequence after another.

    Attributes:
        targets: the target's features that the drafter learns to predict. Where a level has none,
            the feature of level 0 takes its place.
        indices: index of each gathered position among all positions of the batch.
        chosen: indices of the active experts; None if all experts are active.
        normalizers: normalizers of the target's distributions at `targets`; None if they are not
            known.
    """

    features: Float[Tensor, "n levels components hidden"]
    log_weights: Float[Tensor, "n components"]
    gate: Float[Tensor, "n experts"]
    targets: Float[Tensor, "n levels hidden"]
    next_tokens: Int[Tensor, "n levels"]
    valid: Bool[Tensor, "n levels"]
    weight: Float[Tensor, " n"]
    sequence_sizes: tuple[int, ...]
    indices: Int[Tensor, " n"]
    chosen: Int[Tensor, "n active"] | None = None
    normalizers: Normalizers | None = None


def gather_examples(
    output: ExpertsOutput,
    target_features: Float[Tensor, "batch length hidden"],
    batch: Batch,
    sample: int,
    decay: float,
    normalizers: Normalizers | None = None,
) -> Examples:
    """Return the positions whose next token is a response token and whose distance is at least 1.

    Args:
        decay: factor gamma; the weight of a position at distance d is gamma^(d - 1).
    """
    levels, count = output.features.shape[2], batch.token_ids.shape[1]
    index = torch.arange(count, device=batch.token_ids.device)
    distance = index - batch.anchors[:, sample]
    valid = torch.stack([batch.targets_exist(1 + level) for level in range(levels)], dim=-1)
    has_loss = valid[..., 0] & (distance >= 1)
    indices, sequence_sizes = indices_of(has_loss), _sizes_of(has_loss)
    sequence, column = (indices // count)[:, None], (indices % count)[:, None]
    ahead = (column + torch.arange(levels, device=index.device)).clamp(max=count - 1)
    following = (ahead + 1).clamp(max=count - 1)
    is_there = valid.flatten(0, 1)[indices]
    goal = torch.where(is_there, ahead, column)
    return Examples(
        features=output.features.flatten(0, 1)[indices],
        log_weights=output.log_weights.flatten(0, 1)[indices],
        gate=output.gate.flatten(0, 1)[indices],
        chosen=None if output.chosen is None else output.chosen.flatten(0, 1)[indices],
        targets=target_features[sequence, goal],
        next_tokens=batch.token_ids[sequence, following],
        valid=is_there,
        weight=decay ** (distance.flatten()[indices] - 1).float(),
        sequence_sizes=sequence_sizes,
        indices=indices,
        normalizers=None if normalizers is None else normalizers.at(sequence, goal),
    )


def _sizes_of(has_loss: Bool[Tensor, "batch length"]) -> tuple[int, ...]:
    """Return the number of positions with a loss in each sequence; all positions on meta."""
    if has_loss.is_meta:
        batch, count = has_loss.shape
        return (count,) * batch
    return tuple(has_loss.sum(dim=1).tolist())
