"""One vector for the last three tokens (the trigram encoder of Chimera, arXiv 2402.15758)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from moa.norm import RMSNorm

NUM_EARLIER = 2  # number of tokens before its own that a trigram contains


class TrigramInput(nn.Module):
    """Adds to each token's embedding a vector computed from it and the two embeddings before it.

    `x_i + W2 silu(W1 norm([x_i; x_{i-1}; x_{i-2}]))`; embeddings before the first token are zeros.
    """

    def __init__(self, hidden: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        width = (1 + NUM_EARLIER) * hidden
        self.norm = RMSNorm(width, eps=norm_eps)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        earlier: Float[Tensor, "batch queries earlier hidden"],
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return one vector for each query."""
        several = torch.cat((embeddings.unsqueeze(2), earlier[:, :, :NUM_EARLIER]), dim=2)
        return embeddings + self.down(silu(self.up(self.norm(several.flatten(2)))))
