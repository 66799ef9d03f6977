"""The positions of a batch that carry a loss, gathered from the packed rows.

Alignment, for a position i drafted at distance d = i - anchor >= 1, at level k = 0, 1, ...:

    output at i, level k            predicts   Y[i + k], whose logits are the law of x[i + k + 1]
    the posterior used at level k   knows      x[i + 1], ..., x[i + k]
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.experts import ExpertsOutput
from training.loss.batch import Batch


class Examples(NamedTuple):
    """Gathered positions, in row order; `row_sizes` says how many each packed row gave."""

    features: Float[Tensor, "n levels components hidden"]
    log_weights: Float[Tensor, "n components"]
    gate: Float[Tensor, "n experts"]
    targets: Float[Tensor, "n levels hidden"]
    next_tokens: Int[Tensor, "n levels"]
    valid: Bool[Tensor, "n levels"]
    weight: Float[Tensor, " n"]
    row_sizes: tuple[int, ...]
    places: Int[Tensor, " n"]  # of these positions among all, row after row


def gather_examples(
    output: ExpertsOutput,
    target_features: Float[Tensor, "batch rows hidden"],
    batch: Batch,
    draw: int,
    decay: float,
) -> Examples:
    """Return the positions whose next token is a response token and whose distance is at least 1.

    Args:
        output: of the drafter at every position.
        target_features: Y at every position.
        batch: the packed rows.
        draw: which of the batch's anchors the output was made with.
        decay: gamma; a position at distance d weighs gamma^(d - 1).
    """
    levels, count = output.features.shape[2], batch.token_ids.shape[1]
    index = torch.arange(count, device=batch.token_ids.device)
    distance = index - batch.anchors[:, draw]
    valid = torch.stack([batch.targets_exist(1 + level) for level in range(levels)], dim=-1)
    chosen = valid[..., 0] & (distance >= 1)
    places, row_sizes = _places(chosen)
    row, column = (places // count)[:, None], (places % count)[:, None]
    ahead = (column + torch.arange(levels, device=index.device)).clamp(max=count - 1)
    following = (ahead + 1).clamp(max=count - 1)
    return Examples(
        features=output.features.flatten(0, 1)[places],
        log_weights=output.log_weights.flatten(0, 1)[places],
        gate=output.gate.flatten(0, 1)[places],
        targets=target_features[row, ahead],
        next_tokens=batch.token_ids[row, following],
        valid=valid.flatten(0, 1)[places],
        weight=decay ** (distance.flatten()[places] - 1).float(),
        row_sizes=row_sizes,
        places=places,
    )


def _places(chosen: Bool[Tensor, "batch rows"]) -> tuple[Tensor, tuple[int, ...]]:
    """Return where positions are chosen, row after row, and how many in each row.

    On the meta device, where nobody knows, these are all.
    """
    if chosen.is_meta:
        batch, count = chosen.shape
        return torch.arange(batch * count, device=chosen.device), (count,) * batch
    return chosen.flatten().nonzero().squeeze(1), tuple(chosen.sum(dim=1).tolist())
