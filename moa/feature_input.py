"""Features beside tokens: the input of drafters that feed their own predictions back."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

Vectors = Float[Tensor, "batch queries hidden"]


class FeatureInput(nn.Module):
    """Joins each token with the feature of the position before it: `[embedding(x_i); f_{i-1}]`.

    EAGLE (arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840) and published Jakiro (2502.06282)
    draft with this input. f is the target's own feature where it is known; beyond, the drafter's
    prediction is read in its place.

        position            i - 1            i
        token                                x_i
        feature             f_{i-1}          the output here predicts f_i, the law of x_{i+1}

    Args:
        hidden: width of embeddings and features.
        input_norms: whether both are normalised first, as EAGLE-3 does.
    """

    def __init__(self, hidden: int, input_norms: bool) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(hidden, eps=1e-6) if input_norms else nn.Identity()
        self.feature_norm = nn.RMSNorm(hidden, eps=1e-6) if input_norms else nn.Identity()
        self.join = nn.Linear(2 * hidden, hidden)

    def forward(self, embeddings: Vectors, previous: Vectors) -> Vectors:
        """Return the start of the residual stream.

        Args:
            embeddings: of the tokens.
            previous: the feature of the position before each; zeros before the first.
        """
        return self.join(self.normed(embeddings, previous))

    def normed(
        self, embeddings: Vectors, previous: Vectors
    ) -> Float[Tensor, "batch queries twice_hidden"]:
        """Return what is joined; arguments as for `forward`."""
        both = (self.token_norm(embeddings), self.feature_norm(previous))
        return torch.cat(both, dim=-1)
