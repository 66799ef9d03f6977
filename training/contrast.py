"""Contrastive feature loss: tell the own target feature from those of other positions (InfoNCE)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize


def contrastive_loss(
    predicted: Float[Tensor, "n hidden"],
    goal: Float[Tensor, "n hidden"],
    target_best: Int[Tensor, " n"],
    valid: Bool[Tensor, " n"],
    row_sizes: tuple[int, ...],
    temperature: float,
) -> Float[Tensor, " n"]:
    """Return InfoNCE of each position (arXiv 1807.03748) on unit vectors.

    The positive is the position's own target feature; negatives are those of the valid positions
    of the same packed row whose target prefers another token.

    Args:
        predicted: drafter features.
        goal: target features.
        target_best: the target's most likely next token at each position.
        valid: positions whose target feature exists; the loss of others is meaningless.
        row_sizes: how many consecutive positions belong to each packed row.
        temperature: divides the cosine similarities.
    """
    pieces = [part.split(row_sizes) for part in (predicted, goal, target_best, valid)]
    rows = zip(*pieces, strict=True)
    return torch.cat([_row_loss(p, g, b, v, temperature) for p, g, b, v in rows])


def _row_loss(
    predicted: Tensor, goal: Tensor, target_best: Tensor, valid: Tensor, temperature: float
) -> Tensor:
    similarity = normalize(predicted, dim=-1) @ normalize(goal, dim=-1).mT / temperature
    own = torch.eye(len(goal), dtype=torch.bool, device=goal.device)
    excluded = ((target_best[:, None] == target_best) | ~valid) & ~own
    return -similarity.masked_fill(excluded, float("-inf")).log_softmax(dim=-1).diagonal()
