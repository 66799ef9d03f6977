"""Predicted states of later tokens, for the last layers (Hidden Transfer, arXiv 2404.12022)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jakiro.experts import ExpertsOutput
from jakiro.levels.masks import group_mask


class HiddenTransfer(nn.Module):
    """One matrix per level, from a hidden state of the target to those of the next positions.

    It takes the place of the experts. The state at the input of the target's last layers is all
    that is read:

        position            i - 1        i          i + 1
        state               h_{i-1}      W_0 h      W_1 h
        after the layers    known        predicts f_i, then f_{i+1}

    The published method runs these rows beside those of the nodes that the target verifies. No node
    attends to such a row, so they are the same in a pass of their own, which needs them for
    the last verified token only.
    """

    beta = None  # there is no contrast between experts

    def __init__(self, hidden: int, num_levels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(hidden).repeat(num_levels, 1, 1))

    def forward(self, stream: Float[Tensor, "batch queries hidden"]) -> ExpertsOutput:
        """Return the states of all levels, to which the last layers must still be applied."""
        states = torch.einsum("lgh,bqh->bqlg", self.weight, stream)
        one = torch.ones_like(stream[..., :1])
        return ExpertsOutput(states.unsqueeze(3), torch.zeros_like(one), one)


class PseudoRows(NamedTuple):
    """The states of all levels as queries of the target's last layers.

    Attributes:
        states: states of all levels of the first query, then of the second one, and so on.
        own: True where a state may attend to another one: to the earlier levels of its query.
    """

    states: Float[Tensor, "batch rows hidden"]
    positions: Int[Tensor, "batch rows"]
    own: Bool[Tensor, "batch rows rows"]

    @classmethod
    def of(cls, output: ExpertsOutput, positions: Int[Tensor, "batch queries"]) -> "PseudoRows":
        """Return the states of all levels."""
        batch, count, levels = output.features.shape[:3]
        ahead = torch.arange(levels, device=positions.device)
        own = group_mask(count, levels, positions.device).expand(batch, -1, -1)
        return cls(
            output.features[:, :, :, 0].flatten(1, 2),
            (positions[:, :, None] + ahead).flatten(1),
            own,
        )


def with_features(
    output: ExpertsOutput, features: Float[Tensor, "batch rows hidden"]
) -> ExpertsOutput:
    """Return an output whose states are replaced by the features that the last layers computed.

    Args:
        features: output of the last layers for `PseudoRows.of(output, ...)`.
    """
    return output._replace(features=features.unflatten(1, output.features.shape[1:3])[..., None, :])
