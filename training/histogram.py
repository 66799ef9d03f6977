"""How shares between 0 and 1 are distributed, counted in equal bins."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

NUM_BINS = 20


class Histogram:
    """Counts the shares of several series; nothing waits for the device until they are read.

    Args:
        num_series: series that are counted side by side.
        device: where the shares are.
    """

    def __init__(self, num_series: int, device: torch.device) -> None:
        self.counts: Float[Tensor, "series bins"] = torch.zeros(
            num_series, NUM_BINS, dtype=torch.float64, device=device
        )

    def add(self, shares: Float[Tensor, "n series"]) -> None:
        """Count one share of each series for every row; 1 belongs to the last bin."""
        bins: Int[Tensor, "series n"] = (shares.T * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        self.counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.float64))
